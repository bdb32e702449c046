"""RMS norms with fewer passes over memory have the outputs and gradients of transformers' norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from art.config import TrainerConfig
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.fast_norms import speed_up_norms

SIZE = 32


def run(norm: Any, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and the gradients of input and weight."""
    x = x.clone().requires_grad_()
    out = norm(x)
    return [out, *torch.autograd.grad(out, [x, norm.weight], grad)]


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("shape", [(1, 7, SIZE), (1, 5, 3, SIZE)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_a_fast_norm_is_the_norm(kind: Any, shape: tuple[int, ...], size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    norm, x = kind(SIZE, eps=1e-6), size * torch.randn(shape, generator=generator)
    norm.weight.data = torch.randn(SIZE, generator=generator)
    grad = torch.randn(shape, generator=generator)
    all_expected = run(norm, x, grad)
    speed_up_norms(torch.nn.Sequential(norm))
    assert type(norm).__name__ == f"Fast{kind.__name__}"
    for found, expected in zip(run(norm, x, grad), all_expected, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.detach().abs().max()))


def test_a_frozen_weight_gets_no_gradient_and_an_input_without_one_none() -> None:
    norm = Qwen3RMSNorm(SIZE).requires_grad_(False)
    speed_up_norms(torch.nn.Sequential(norm))
    x = torch.randn(3, SIZE)
    assert not norm(x).requires_grad
    norm(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is None


class _Centred(Qwen3RMSNorm):  # type: ignore[misc]
    """A norm that subtracts the mean, under a name that says otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x - x.mean(-1, keepdim=True))
        return out


_CentredRMSNorm = type("CentredRMSNorm", (_Centred,), {})


class _LargeEps(Qwen3RMSNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)
        return out


_LargeEpsRMSNorm = type("LargeEpsRMSNorm", (_LargeEps,), {})


@pytest.mark.parametrize(
    "norm",
    [Gemma3RMSNorm(SIZE), _CentredRMSNorm(SIZE), _LargeEpsRMSNorm(SIZE), torch.nn.LayerNorm(SIZE)],
    ids=["weight plus one", "centred", "another eps", "layer norm"],
)
def test_norms_of_another_formula_stay_as_they_are(norm: Any) -> None:
    kind = type(norm)
    speed_up_norms(torch.nn.Sequential(norm))
    assert type(norm) is kind


def test_of_one_class_only_norms_with_a_weight_change() -> None:
    with_weight, without = Gemma4RMSNorm(SIZE), Gemma4RMSNorm(SIZE, with_scale=False)
    x = torch.randn(3, SIZE)
    expected = without(x)
    speed_up_norms(torch.nn.Sequential(with_weight, without))
    assert (type(with_weight).__name__, type(without)) == ("FastGemma4RMSNorm", Gemma4RMSNorm)
    torch.testing.assert_close(without(x), expected)


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_a_model_in_float32_on_a_cpu_has_fast_norms(family: str, model_path: Callable[[str], str]) -> None:
    path = model_path(family)
    fast = load_base_model(path, TrainerConfig(device="cpu", dtype="float32", num_threads=1)).model
    low = load_base_model(path, TrainerConfig(device="cpu", dtype="bfloat16", num_threads=1)).model
    names = [{type(module).__name__ for module in model.modules()} for model in (fast, low)]
    assert [f"Fast{family}RMSNorm" in name for name in names] == [True, False]
    assert list(fast.state_dict()) == list(low.state_dict())
