"""The adapted linear layer computes what peft's does, and is used only where it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from art.config import DppoConfig, LoraConfig, TrainerConfig
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.lora import LoraLinear, LoraPolicy
from tests.support.trainer_reference import reference_gradient, tree_gradient
from tests.support.trainer_samples import random_samples

LORA = LoraConfig(rank=4, alpha=8)


def make_policy(model_path: Callable[[str], str], family: str = "Qwen2", **config: Any) -> LoraPolicy:
    base = load_base_model(model_path(family), TrainerConfig(device="cpu", num_threads=1, **config))
    policy = LoraPolicy(base, LORA)
    policy.values.copy_(torch.randn(policy.values.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
    return policy


def adapted_layers(policy: LoraPolicy) -> list[LoraLinear]:
    return [layer for layer in policy._layers.values() if isinstance(layer, LoraLinear)]


def values_and_gradients(layer: torch.nn.Module, x: torch.Tensor, call: Any) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    out = call(leaf)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, [leaf, *parameters], weights)]


@pytest.mark.parametrize("shape", [(1, 9, 32), (7, 32), (1, 32)])
def test_values_and_gradients_equal_those_of_peft(shape: tuple[int, ...], model_path: Callable[[str], str]) -> None:
    layers = adapted_layers(make_policy(model_path))
    assert len(layers) == 14
    assert {layer.base_layer.bias is None for layer in layers} == {True, False}  # both kinds are there
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for layer in layers:
        if layer.in_features != shape[-1]:
            continue
        expected = values_and_gradients(layer, x, super(LoraLinear, layer).forward)
        for one, other in zip(values_and_gradients(layer, x, layer), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_whole_update_has_the_reference_gradient(model_path: Callable[[str], str]) -> None:
    policy = make_policy(model_path)
    expected = reference_gradient(policy, random_samples(3), DppoConfig())
    assert float((tree_gradient(policy)[0] - expected).norm() / expected.norm()) < 1e-5


def test_the_base_model_is_its_own_with_the_adapter_off(model_path: Callable[[str], str]) -> None:
    policy = make_policy(model_path)
    layer = adapted_layers(policy)[0]
    x = torch.randn(3, layer.in_features)
    with policy._peft_model.disable_adapter():
        assert torch.equal(layer(x), layer.base_layer(x))
    assert not torch.allclose(layer(x), layer.base_layer(x))


def test_frozen_weights_get_no_gradient(model_path: Callable[[str], str]) -> None:
    policy = make_policy(model_path)
    tree_gradient(policy)
    assert all(layer.base_layer.weight.grad is None for layer in adapted_layers(policy))


# -- any dtype, any layer --


class Special(torch.nn.Linear):  # type: ignore[misc]  # torch is not followed by the type checker
    """A layer whose product is its own, like a quantised one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


def reference(layer: LoraLinear, inputs: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
    """Output, gradients of the inputs, of A and of B, in float64."""
    a, b, scale = layer._factors()
    leaves = [x.detach().double().requires_grad_() for x in (*inputs, a, b)]
    x = torch.nn.functional.silu(leaves[0]) * leaves[1] if len(inputs) == 2 else leaves[0]
    base = layer.base_layer
    bias = None if base.bias is None else base.bias.double()
    out = torch.nn.functional.linear(x, base.weight.double(), bias) * factor + (x @ leaves[-2].T) @ leaves[-1].T * scale
    grad = gradient_of(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def gradient_of(out: torch.Tensor) -> torch.Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out.dtype)


def relative_errors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]


@pytest.mark.parametrize("way", ["plain", "gated", "special", "special and gated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_are_as_near_to_float64_as_those_of_peft(
    dtype: Any, way: str, model_path: Callable[[str], str]
) -> None:
    tolerance = {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
    layers = adapted_layers(make_policy(model_path, dtype=dtype))
    assert len(layers) == 14
    for number, layer in enumerate(layers):
        factor = 1.0
        if "special" in way:
            layer.base_layer.__class__, factor = Special, 0.5
        generator = torch.Generator().manual_seed(number)
        shape = (2, 1100, layer.in_features)  # more rows than one chunk of the sums
        count = 2 if "gated" in way else 1
        inputs = [torch.randn(shape, generator=generator).to(layer.base_layer.weight.dtype) for _ in range(count)]

        def call(*leaves: torch.Tensor, forward: Any, layer: LoraLinear = layer) -> torch.Tensor:
            return forward(torch.nn.functional.silu(leaves[0]) * leaves[1] if len(leaves) == 2 else leaves[0])

        def gradients(forward: Any, layer: LoraLinear = layer, inputs: Any = inputs) -> list[torch.Tensor]:
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = forward(*leaves)
            a, b, _ = layer._factors()
            found = torch.autograd.grad(out, [*leaves, a, b], gradient_of(out))
            assert [g.dtype for g in found] == [x.dtype for x in leaves] + [torch.float32] * 2
            return [out.detach(), *found]

        def own(*leaves: torch.Tensor, layer: LoraLinear = layer) -> torch.Tensor:
            return layer.gated(*leaves, torch.nn.functional.silu) if len(leaves) == 2 else layer(*leaves)

        def theirs(*leaves: torch.Tensor, layer: LoraLinear = layer) -> torch.Tensor:
            return call(*leaves, forward=super(LoraLinear, layer).forward)

        expected = reference(layer, inputs, factor)
        ours, pefts = (relative_errors(gradients(way), expected) for way in (own, theirs))
        assert max(ours) < tolerance
        for one, other in zip(ours, pefts, strict=True):
            assert one < 2 * other + tolerance / 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_of_another_kind_give_the_same_update(dtype: str, model_path: Callable[[str], str]) -> None:
    """A subclass of a linear layer is used by its own `forward`."""
    expected = tree_gradient(make_policy(model_path, dtype=dtype))[0]
    policy = make_policy(model_path, dtype=dtype)
    for layer in adapted_layers(policy):
        layer.base_layer.__class__ = type("Other", (torch.nn.Linear,), {})
        assert not layer.is_plain
    found = tree_gradient(policy)[0]
    assert float((found - expected).norm() / expected.norm()) < {"float32": 1e-5, "bfloat16": 0.05}[dtype]


def test_a_bfloat16_update_has_the_direction_of_the_float32_one(model_path: Callable[[str], str]) -> None:
    expected = reference_gradient(make_policy(model_path), random_samples(3), DppoConfig())
    found = tree_gradient(make_policy(model_path, dtype="bfloat16"))[0]
    assert float(torch.cosine_similarity(found, expected, dim=0)) > 0.99
