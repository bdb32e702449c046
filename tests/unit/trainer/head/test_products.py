"""The bfloat16 head against float64: log-probs lose nothing, and gradients one rounding. On the CPU and on CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from art.trainer import head as module
from art.trainer.head import Head, multiply, operand
from art.trainer.step.logprobs import TargetRows, group_by_row, target_logprobs
from art.trainer.tree import tree
from art.trainer.tree.tree import VocabularyMask, build_tree, check_sample
from tests.support.trainer_samples import VOCAB_SIZE, random_samples

NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
UNIT_ROUNDOFF = 2**-8
"""Largest relative error of a number that is rounded to bfloat16, twice over: of e, and of the gradient itself."""


class Case(NamedTuple):
    hidden: Tensor  # [N, H] bfloat16
    weight: Tensor  # [V, H] bfloat16
    rows: TargetRows


def make_case(device: str, *, vocab_size: int, hidden_size: int, count: int, temperature: float = 1.0) -> Case:
    """Distributions from flat to peaked: the targets have probabilities from 1e-6 to nearly 1."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(vocab_size, hidden_size, generator=generator) / hidden_size**0.5).bfloat16()
    tokens = torch.randint(0, vocab_size, (count,), generator=generator)
    peak = torch.linspace(0, 20 * temperature, count)[:, None]
    hidden = (torch.randn(count, hidden_size, generator=generator) + peak * weight[tokens].float()).bfloat16()
    index = torch.arange(count, device=device)
    rows = TargetRows(
        queries=index, temperatures=torch.full((count,), temperature, device=device), order=index, rows=index,
        token_ids=tokens.to(device), starts=list(range(count + 1)),
    )  # fmt: skip
    return Case(hidden.to(device), weight.to(device), rows)


def found(case: Case, head: Head) -> list[Tensor]:
    """Log-probs and entropies [N], and the gradient [N, H] of each one's sum, in float64 on the CPU."""
    leaf = case.hidden.to(head.weight.dtype).clone().requires_grad_()
    values = target_logprobs(leaf, head, case.rows, entropy_gradient=True)
    gradients = [torch.autograd.grad(value.sum(), leaf, retain_graph=True)[0] for value in values]
    return [tensor.detach().double().cpu() for tensor in (*values, *gradients)]


def exact(case: Case) -> list[Tensor]:
    """Compute log-probs, entropies and their gradients from all logits at once, in float64."""
    leaf = case.hidden.double().cpu().requires_grad_()
    logits = leaf @ case.weight.double().cpu().T / case.rows.temperatures.double().cpu()[:, None]
    distributions = logits.log_softmax(-1)
    logprobs = distributions.gather(1, case.rows.token_ids.cpu()[:, None])[:, 0]
    values = logprobs, -(distributions.exp() * distributions).sum(-1)
    return [*values, *(torch.autograd.grad(value.sum(), leaf, retain_graph=True)[0] for value in values)]


def relative_errors(gradient: Tensor, right: Tensor) -> Tensor:
    return (gradient - right).norm(dim=1) / right.norm(dim=1)


def check_against_float64(case: Case) -> None:
    logprobs, entropies, gradient, of_entropy = found(case, Head(case.weight, None))
    right = exact(case)
    assert right[0].exp().max() > 0.999
    assert right[0].exp().min() < 2 / len(case.weight)
    assert (logprobs - right[0]).square().mean().sqrt() < 3e-6
    assert (logprobs - right[0]).abs().max() < 2e-5
    assert (entropies - right[1]).abs().max() < 2e-5
    cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), right[2].flatten(), dim=0)
    assert cosine > 1 - 1e-5
    # Where the target is nearly certain, 1 - p has few digits in float32 already.
    uncertain = right[0] < -1e-3
    assert relative_errors(gradient, right[2])[uncertain].max() < UNIT_ROUNDOFF
    assert relative_errors(of_entropy, right[3])[uncertain].max() < UNIT_ROUNDOFF


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_bfloat16_head_against_float64(device: str, temperature: float) -> None:
    check_against_float64(make_case(device, vocab_size=8192, hidden_size=256, count=64, temperature=temperature))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_bfloat16_head_of_real_shape_against_float64(device: str) -> None:
    """A vocabulary of 151,936 and the hidden size of a 4B model."""
    check_against_float64(make_case(device, vocab_size=151_936, hidden_size=2560, count=32))


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_products_give_the_log_probs_of_a_float32_head(device: str) -> None:
    """Nothing but the order of summation differs, so no setting is needed to choose between the two."""
    case = make_case(device, vocab_size=8192, hidden_size=256, count=64)
    low, high = (found(case, Head(weight, None))[:2] for weight in (case.weight, case.weight.float()))
    for one, other in zip(low, high, strict=True):
        assert (one - other).abs().max() < 1e-5
    rounded = (case.hidden.double() @ case.weight.double().T).bfloat16().double().log_softmax(-1).cpu()
    rounded = rounded.gather(1, case.rows.token_ids.cpu()[:, None])[:, 0]
    assert (rounded - high[0]).abs().max() > 1e-2  # what rounding the logits would cost


@pytest.mark.parametrize("device", DEVICES)
def test_a_likely_token_is_exact_in_the_gradient(device: str) -> None:
    """The largest e of a row is 1, so a gradient of 1 - p keeps its digits however small it is."""
    case = make_case(device, vocab_size=8192, hidden_size=256, count=64)
    *_, gradient, _ = found(case, Head(case.weight, None))
    right = exact(case)
    likely = (right[0] > -1e-3) & (right[0] < -1e-4)
    assert likely.any()
    assert relative_errors(gradient, right[2])[likely].max() < 5 * UNIT_ROUNDOFF


@pytest.mark.parametrize("few", [True, False], ids=["gathered", "in tiles"])
@pytest.mark.parametrize("device", DEVICES)
def test_masked_rows_use_the_same_products(device: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of few and of many tokens, in bfloat16 against float64 over the allowed tokens."""
    monkeypatch.setattr(tree, "FEW", VOCAB_SIZE if few else 0)
    monkeypatch.setattr(module, "GATHER_COST", 0)
    paths = [path for sample in random_samples(0, count=10) if (path := check_sample(sample, vocab_size=VOCAB_SIZE))]
    targets = build_tree(paths).targets
    allowed = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    allowed[::3] = allowed[torch.from_numpy(targets.token_ids)] = True
    mask = VocabularyMask.from_ids(allowed.nonzero()[:, 0].int().numpy(), VOCAB_SIZE)
    targets = replace(targets, masks=0 * targets.masks, mask_table=[mask])
    rows = group_by_row(targets, torch.device(device))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB_SIZE, 16, generator=generator).bfloat16().to(device)
    hidden = torch.randn(int(targets.queries.max()) + 1, 16, generator=generator).bfloat16().to(device)
    used = []
    monkeypatch.setattr(module, "multiply", lambda *args: used.append(args[0].dim()) or multiply(*args))
    leaf, right = hidden.clone().requires_grad_(), hidden.double().cpu().requires_grad_()
    logprobs = rows.spread(target_logprobs(leaf, Head(weight, None), rows)[0])
    assert (3 in used) == few  # batches of gathered rows
    logits = right[targets.queries] @ weight.double().cpu().T / torch.from_numpy(targets.temperatures)[:, None]
    logits = logits.masked_fill(~allowed, float("-inf"))
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(targets.token_ids)[:, None])[:, 0]
    assert (logprobs - expected).abs().max() < 1e-5
    logprobs.sum().backward()
    expected.sum().backward()
    error = (leaf.grad.double().cpu() - right.grad).norm() / right.grad.norm()
    assert error < UNIT_ROUNDOFF


def test_what_is_multiplied() -> None:
    """bfloat16 numbers only where head and hidden states have them, and float32 numbers as they are."""
    low, high = torch.ones(2, 2, dtype=torch.bfloat16), torch.full((2, 2), 1 + 2**-12)
    assert Head(low, None).product_dtype(low) == torch.bfloat16
    for weight, hidden in ((low, high), (high, low), (low.half(), low.half())):
        assert Head(weight, None).product_dtype(hidden) == torch.float32
    assert torch.equal(operand(high, torch.float32), high)
    assert torch.equal(operand(high, torch.bfloat16), torch.ones(2, 2))
    assert operand(high, torch.bfloat16).dtype == torch.float32


def test_on_cuda_torch_takes_these_products() -> None:
    """Shapes and types on a pretended device: `out_dtype` exists for matrices, batches and `out`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        left = torch.empty(3, 4, dtype=torch.bfloat16, device="cuda")
        batch = left.expand(2, 3, 4)
        assert operand(left, torch.bfloat16).dtype == torch.bfloat16
        out = torch.empty(3, 3, device="cuda")
        assert module.multiply(left, left.T, out=out).dtype == torch.float32
        assert module.multiply(batch, batch.transpose(1, 2)).dtype == torch.float32
        module.add_product(out, left, left.T)
