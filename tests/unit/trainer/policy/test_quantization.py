"""QLoRA: the base in 4 bits, the adapter as ever, and an engine that rounds alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from art.config import DppoConfig, LoraConfig, TrainerConfig
from art.engines.torch.base_model import _load_hf
from art.errors import ConfigError
from art.kernels import base_model
from art.kernels.base_model import loading_options
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.lora import LoraPolicy
from tests.support.trainer_reference import reference_gradient, tree_gradient
from tests.support.trainer_samples import random_samples

pytest.importorskip("bitsandbytes")

LORA = LoraConfig(rank=8, alpha=16)


def make_policy(path: str, **config: Any) -> LoraPolicy:
    base = load_base_model(path, TrainerConfig(device="cpu", num_threads=1, **config))
    policy = LoraPolicy(base, LORA)
    policy.values.copy_(torch.randn(policy.values.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
    return policy


@pytest.fixture
def rounded_path(model_path: Callable[[str], str], tmp_path: Path) -> str:
    """A plain model whose weights are what the engine computes with, saved whole."""
    plain = _load_hf(model_path("Qwen2"), "cpu", torch.float32, "none")
    rounded = dict(_load_hf(model_path("Qwen2"), "cpu", torch.float32, "nf4").named_parameters())
    for name, parameter in plain.named_parameters():
        parameter.data.copy_(rounded[name])
    plain.save_pretrained(tmp_path / "rounded")
    return str(tmp_path / "rounded")


def test_linear_layers_of_the_decoder_are_kept_in_4_bits(model_path: Callable[[str], str]) -> None:
    whole, rounded = (make_policy(model_path("Qwen2"), quantization=q) for q in ("none", "nf4"))
    kinds = {layer.base_layer.weight.dtype for layer in rounded._layers.values()}
    assert kinds == {torch.uint8}
    sizes = [sum(layer.base_layer.weight.nbytes for layer in p._layers.values()) for p in (whole, rounded)]
    assert sizes[1] * 8 == sizes[0]
    assert rounded.base.head.weight.dtype == torch.float32
    assert torch.equal(rounded.base.head.weight, whole.base.head.weight)


def test_the_gradient_is_that_of_a_plain_model_with_the_rounded_weights(
    rounded_path: str, model_path: Callable[[str], str]
) -> None:
    plain = make_policy(rounded_path)
    expected = reference_gradient(plain, random_samples(3), DppoConfig())
    found = tree_gradient(make_policy(model_path("Qwen2"), quantization="nf4"))[0]
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    unrounded = reference_gradient(make_policy(model_path("Qwen2")), random_samples(3), DppoConfig())
    assert float((unrounded - expected).norm() / expected.norm()) > 1e-2  # rounding is felt


# -- what is refused --


def test_a_missing_package_is_named(model_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bitsandbytes: pip install 'agent-reinforcement-trainer\[qlora\]'"):
        load_base_model(model_path("Qwen2"), TrainerConfig(device="cpu", quantization="nf4"))


def test_devices_without_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match="not on 'mps'"):
        loading_options("nf4", device="mps", dtype=torch.float32)


def test_quantised_weights_are_not_sharded() -> None:
    with pytest.raises(ConfigError, match="use one of the two"):
        TrainerConfig(quantization="nf4", shard_base=True, num_processes=2)
