"""A layer of real shape holds on the device what the forecast says.

On a GPU the attention is FlexAttention; on the CPU, torch's flash attention, which keeps the same.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from art.config import LoraConfig
from art.memory import Checkpointing, saved_bytes_per_token, shape_of
from art.trainer.policy.base_model import keep_less, set_checkpointing
from art.trainer.policy.lora import LoraPolicy
from tests.support.layer_memory import SHAPE_4B, flash_attention, held_bytes, zero_model

NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("device", "tokens"),
    [pytest.param("cpu", 128, marks=pytest.mark.slow), pytest.param("cuda", 16_384, marks=NEEDS_CUDA)],
)
def test_a_layer_of_4b_shape_holds_what_is_forecast(
    device: str, tokens: int, mode: Checkpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = zero_model("Qwen3", 1, torch.bfloat16, **SHAPE_4B)
    base.model.to(device)
    base = replace(base, device=torch.device(device), head=replace(base.head, weight=base.model.lm_head.weight))
    keep_less(base.model)
    LoraPolicy(base, LoraConfig(rank=16))
    set_checkpointing(base.model, mode)
    with flash_attention(monkeypatch) if device == "cpu" else contextlib.nullcontext():
        held_bytes(base, tokens)  # compiles the attention
        held = held_bytes(base, tokens)
    shape = shape_of({**SHAPE_4B, "model_type": "qwen3", "num_hidden_layers": 1, "vocab_size": 64})
    layer = saved_bytes_per_token(shape, dtype="bfloat16", lora=LoraConfig(rank=16), checkpointing=mode)
    rest = 2 * 2560 + 2 * 2560 + 2 * 2 * 128  # input and output of the final norm; cosines and sines
    assert held / tokens == pytest.approx(layer + rest, rel=0.05)
