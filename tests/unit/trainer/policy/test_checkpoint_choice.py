"""`gradient_checkpointing="auto"` takes the least recomputation that fits into memory, in all processes alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from art.config import LoraConfig, TrainerConfig
from art.memory import Checkpointing, ModelShape, activation_bytes, saved_bytes_per_token, shape_of
from art.trainer import memory
from art.trainer.distributed import ALONE
from art.trainer.memory import choose_mode, forecast_activations, prepare_checkpointing
from art.trainer.policy.base_model import keep_less, load_base_model, set_checkpointing
from art.trainer.policy.full import FullPolicy
from art.trainer.policy.lora import LoraPolicy
from art.trainer.policy.policy import Policy
from art.trainer.tree import SamplePath
from tests.support.layer_memory import SHAPE_4B, flash_attention, held_bytes, saved_bytes, zero_model
from tests.support.trainer_samples import paths_of, random_samples

LORA = LoraConfig(rank=8)
GIB = 2**30
FORECASTS: dict[Checkpointing, int] = {"none": 50 * GIB, "selective": 15 * GIB, "full": 4 * GIB}


@pytest.fixture
def on_cuda(model_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Policy]:
    """A policy that takes its device for a GPU with so much free memory."""

    def make(free_bytes: int, lora: LoraConfig | None = LORA) -> Policy:
        base = load_base_model(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))
        policy = FullPolicy(base) if lora is None else LoraPolicy(base, lora)
        policy.base = replace(base, device=torch.device("cuda"))
        monkeypatch.setattr(memory, "allocatable_bytes", lambda device: free_bytes)
        return policy

    return make


def paths() -> list[SamplePath]:
    return paths_of(random_samples(3))


def prepare(policy: Policy, team: Any = ALONE, *, max_tokens: int = 4096, **config: Any) -> float:
    return prepare_checkpointing(policy, TrainerConfig(**config), paths(), max_tokens=max_tokens, team=team)


@pytest.mark.parametrize(
    ("free_gib", "mode"), [(130, "none"), (63, "none"), (62, "selective"), (20, "selective"), (10, "full"), (1, "full")]
)
def test_the_first_that_fits_is_chosen_and_the_log_says_why(
    free_gib: int, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_mode(FORECASTS, 16_384, free_gib * GIB) == mode
    expected = (
        f"gradient checkpointing: {mode}; expected activations of 16384 tokens: none 50.0 GiB, selective 15.0 GiB"
    )
    assert expected in caplog.text
    assert f"80 % of {free_gib}.0 GiB free memory" in caplog.text


def test_an_unknown_shape_is_checkpointed(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_mode({}, 100, 10**15) == "full"
    assert "the shape of this model's layers is unknown" in caplog.text


@pytest.mark.parametrize("lora", [LoraConfig(rank=8), None], ids=["lora", "full"])
def test_auto_follows_the_free_memory_from_step_to_step(
    lora: LoraConfig | None, on_cuda: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = on_cuda(GIB, lora)
    forecasts = forecast_activations(policy, sum(len(path.token_ids) for path in paths()))
    assert forecasts["none"] > forecasts["selective"] > forecasts["full"] > 0
    for number, mode in enumerate(("none", "selective", "full")):
        free = int(forecasts[mode] / 0.8) + 1  # type: ignore[index]
        monkeypatch.setattr(memory, "allocatable_bytes", lambda device, free=free: free)
        assert prepare(policy) == number
        assert policy.trained_model.training == (mode != "none")


@pytest.mark.parametrize(("setting", "number"), [(False, 0), ("selective", 1), (True, 2), ("auto", 0)])
def test_other_settings_and_other_devices_do_not_ask_for_memory(
    setting: Any, number: int, model_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(memory, "allocatable_bytes")
    config: dict[str, Any] = {"device": "cpu", "num_threads": 1, "gradient_checkpointing": setting}
    base = load_base_model(model_path("Qwen3"), TrainerConfig(**config))
    policy = LoraPolicy(base, LoraConfig(rank=8))
    assert prepare(policy, **config) == number
    assert base.model.training == (number > 0)


# -- what a layer keeps --


TOKENS = 32
RANK = 16
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def shape(config: dict[str, Any], family: str, *, num_hidden_layers: int = 1) -> ModelShape:
    return shape_of(config | {"model_type": family, "num_hidden_layers": num_hidden_layers, "vocab_size": 64})


def adapted(family: str, num_layers: int, dtype: torch.dtype, config: dict[str, Any], lora: LoraConfig) -> LoraPolicy:
    base = zero_model(family, num_layers, dtype, **config)
    keep_less(base.model)
    return LoraPolicy(base, lora)


def test_a_layer_of_4b_shape_keeps_less_than_half_of_what_pefts_layers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    base = zero_model("Qwen3", 1, torch.bfloat16, **SHAPE_4B)
    peft.get_peft_model(base.model, peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules="all-linear"))
    with flash_attention(monkeypatch):
        theirs = saved_bytes(base, TOKENS) / TOKENS
        ours = adapted("Qwen3", 1, torch.bfloat16, SHAPE_4B, LoraConfig(rank=RANK)).base
        found = saved_bytes(ours, TOKENS) / TOKENS
    after = 2 * 2560 + 2 * 2 * 128  # input of the final norm; cosines and sines, which all layers share
    layer = saved_bytes_per_token(shape(SHAPE_4B, "qwen3"), dtype="bfloat16", lora=LoraConfig(rank=RANK))
    assert found - after == layer == 90_464
    assert theirs > 220 * 1024
    assert (theirs - 4 * 2560) / (found - after) > 2.4


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"]])
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
    expected = saved_bytes_per_token(shape(SMALL, family.lower()), dtype="bfloat16", lora=lora, checkpointing=mode)
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
    expected = saved_bytes_per_token(shape(SMALL, "qwen3"), dtype="bfloat16", lora=None)
    assert (held[1] - held[0]) / 2 / 512 == pytest.approx(expected, rel=0.05)


def test_checkpointed_layers_need_one_whole_layer_more() -> None:
    model, how = shape(SMALL, "llama", num_hidden_layers=10), {"dtype": "float32", "lora": LoraConfig(rank=2)}
    whole, kept = (saved_bytes_per_token(model, **how, checkpointing=mode) for mode in ("none", "full"))
    assert activation_bytes(model, 100, **how, checkpointing="none") == 100 * 10 * whole
    assert activation_bytes(model, 100, **how, checkpointing="full") == 100 * (10 * kept + whole)
