"""What layers keep for the backward pass: less than half of what peft's layers do, and as much as the forecast says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from art.config import LoraConfig
from art.memory.shape import Checkpointing, LayerShape, activation_bytes, saved_bytes_per_token
from art.trainer.policy.layers import set_checkpointing
from art.trainer.policy.lean import keep_less
from art.trainer.policy.lora import LoraPolicy
from tests.support.layer_memory import SHAPE_4B, flash_attention, held_bytes, saved_bytes, zero_model

TOKENS = 32
RANK = 16
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def adapted(family: str, num_layers: int, dtype: torch.dtype, shape: dict[str, Any], lora: LoraConfig) -> LoraPolicy:
    base = zero_model(family, num_layers, dtype, **shape)
    keep_less(base.model)
    policy = LoraPolicy(base, lora)
    policy._merging = []  # as on CUDA: no merged weights
    return policy


def test_a_layer_of_4b_shape_keeps_less_than_half_of_what_pefts_layers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    base = zero_model("Qwen3", 1, torch.bfloat16, **SHAPE_4B)
    peft.get_peft_model(base.model, peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules="all-linear"))
    with flash_attention(monkeypatch):
        theirs = saved_bytes(base, TOKENS) / TOKENS
        ours = adapted("Qwen3", 1, torch.bfloat16, SHAPE_4B, LoraConfig(rank=RANK)).base
        found = saved_bytes(ours, TOKENS) / TOKENS
    after = 2 * 2560 + 2 * 2 * 128  # input of the final norm; cosines and sines, which all layers share
    shape = LayerShape.from_config({**SHAPE_4B, "model_type": "qwen3"})
    assert found - after == saved_bytes_per_token(shape, dtype="bfloat16", rank=RANK) == 90_464
    assert theirs > 220 * 1024
    assert (theirs - 4 * 2560) / (found - after) > 2.4


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"], ["up_proj", "down_proj"]])
def test_the_forecast_is_what_is_held(
    family: str, mode: Checkpointing, targets: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure whole forward passes. The memory of one layer is the difference between two models."""
    lora, tokens = LoraConfig(rank=RANK, target_modules=targets), 512
    held = []
    for num_layers in (1, 3):
        policy = adapted(family, num_layers, torch.bfloat16, SMALL, lora)
        set_checkpointing(policy.trained_model, mode)
        with flash_attention(monkeypatch):
            held.append(held_bytes(policy.base, tokens))
    shape = LayerShape.from_config({**SMALL, "model_type": family.lower()})
    options: dict[str, Any] = {} if targets is None else {"targets": targets}
    expected = saved_bytes_per_token(shape, dtype="bfloat16", rank=RANK, checkpointing=mode, **options)
    assert (held[1] - held[0]) / 2 / tokens == pytest.approx(expected, rel=0.05)


def test_full_finetuning_keeps_the_input_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    for num_layers in (1, 3):
        base = zero_model("Qwen3", num_layers, torch.bfloat16, **SMALL)
        keep_less(base.model)
        for parameter in base.backbone.layers.parameters():
            parameter.requires_grad_()
        with flash_attention(monkeypatch):
            held.append(held_bytes(base, 512))
    shape = LayerShape.from_config({**SMALL, "model_type": "qwen3"})
    expected = saved_bytes_per_token(shape, dtype="bfloat16", rank=None)
    assert (held[1] - held[0]) / 2 / 512 == pytest.approx(expected, rel=0.05)


def test_checkpointed_layers_need_one_whole_layer_more() -> None:
    shape = LayerShape(hidden=8, queries=8, keys=4, num_heads=2, mlp=16)
    sizes = {"num_layers": 10, "num_tokens": 100, "dtype": "float32", "rank": 2}
    kept = [saved_bytes_per_token(shape, dtype="float32", rank=2, checkpointing=mode) for mode in ("none", "full")]
    assert activation_bytes(shape, **sizes) == 100 * 10 * kept[0]
    assert activation_bytes(shape, **sizes, checkpointing="full") == 100 * (10 * kept[1] + kept[0])


def test_shapes_are_read_from_the_configuration_of_a_model() -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "model_type": "llama"}
    dense = LayerShape.from_config({"text_config": config})
    assert dense == LayerShape(hidden=64, queries=64, keys=64, num_heads=4, mlp=96)
    mixture = LayerShape.from_config(config | {"num_experts_per_tok": 2, "moe_intermediate_size": 24})
    assert mixture == replace(dense, mlp=0, experts=48, experts_per_token=2)
    with pytest.raises(KeyError):
        LayerShape.from_config({"hidden_size": 64})
