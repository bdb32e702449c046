from __future__ import annotations

import itertools

import pytest
import torch

from art.trainer.head import Head
from art.trainer.step import logprobs as module
from art.trainer.step.logprobs import TargetRows, group_by_row, target_logprobs
from art.trainer.tree.tree import build_tree, check_sample
from tests.support.trainer_samples import VOCAB_SIZE, random_samples

HIDDEN_SIZE = 16
CPU = torch.device("cpu")


def setup(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, object]:
    paths = [p for s in random_samples(seed, count=10) if (p := check_sample(s, vocab_size=VOCAB_SIZE))]
    tree = build_tree(paths)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(tree), HIDDEN_SIZE, generator=generator)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    return hidden, weight, torch.randn(VOCAB_SIZE, generator=generator), tree.targets


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: object) -> torch.Tensor:
    logits = hidden[targets.queries] @ weight.T + bias
    logits = logits / torch.from_numpy(targets.temperatures)[:, None]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(targets.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("tile", [(1, 1), (3, 7), (4, 10_000), (512, 2**19)])
def test_values_and_gradients_equal_the_full_softmax(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tiles divide neither queries nor vocabulary evenly."""
    monkeypatch.setitem(module._TILE, "cpu", tile)
    hidden, weight, bias, targets = setup()
    rows = group_by_row(targets, CPU)
    assert len(rows.queries) < len(rows.rows)  # some queries do have several targets
    one, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found, _ = target_logprobs(one, Head(weight, bias), rows)
    expected = plain(other, weight, bias, targets)[rows.order]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    coefficients = torch.linspace(-1, 1, len(found))
    (found * coefficients).sum().backward()
    (expected * coefficients).sum().backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile", [(3, 7), (512, 2**19)])
def test_a_scale_and_a_softcap(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, and gradients of log-probs and entropy, are those of autograd in float64."""
    monkeypatch.setitem(module._TILE, "cpu", tile)
    hidden, weight, bias, targets = setup(2)
    rows = group_by_row(targets, CPU)
    one, other = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    found, entropy = target_logprobs(one, Head(weight, bias, 0.5, 3.0), rows, entropy_gradient=True)
    logits = 3.0 * ((0.5 * other[rows.queries] @ weight.double().T + bias.double()) / 3.0).tanh()
    assert float(logits.detach().abs().max()) > 2.9  # the cap does something
    every = (logits / rows.temperatures[:, None]).log_softmax(-1)
    expected = every[rows.rows, rows.token_ids]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(every.exp() * every).sum(-1), rtol=1e-5, atol=1e-5)
    coefficients = torch.linspace(-1, 1, len(found))
    ((found * coefficients).sum() + entropy.square().sum()).backward()
    ((expected * coefficients).sum() + (every.exp() * every).sum(-1).square().sum()).backward()
    torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile", [(3, 7), (512, 2**19)])
def test_entropy(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._TILE, "cpu", tile)
    hidden, weight, bias, targets = setup(1)
    rows = group_by_row(targets, CPU)
    _, entropy = target_logprobs(hidden.requires_grad_(), Head(weight, bias), rows)
    logits = (hidden[rows.queries] @ weight.T + bias) / rows.temperatures[:, None]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy, expected, rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad


def test_the_gradient_of_the_entropy_is_that_of_finite_differences() -> None:
    hidden, weight, bias, targets = setup(6)
    rows = group_by_row(targets, CPU)
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(7))

    def entropies(hidden: torch.Tensor) -> torch.Tensor:
        return target_logprobs(hidden, Head(weight, bias), rows, entropy_gradient=True)[1]

    leaf = hidden.clone().requires_grad_()
    entropies(leaf).sum().backward()
    step = 1e-2
    difference = (entropies(hidden + step * direction) - entropies(hidden - step * direction)).double().sum()
    assert float((leaf.grad * direction).sum()) == pytest.approx(float(difference) / (2 * step), rel=2e-3)


def test_the_entropy_alone_has_a_gradient() -> None:
    """A loss may read the entropy and no log-prob; without a gradient of either, nothing is kept."""
    hidden, weight, bias, targets = setup(1)
    rows = group_by_row(targets, CPU)
    leaf = hidden.clone().requires_grad_()
    target_logprobs(leaf, Head(weight, bias), rows, entropy_gradient=True)[1].sum().backward()
    assert leaf.grad.abs().max() > 0
    assert not target_logprobs(hidden, Head(weight, bias), rows, entropy_gradient=True)[1].requires_grad


def test_large_logits_that_grow_along_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile's logits dwarf those before it: sums so far must shrink to nothing, and neither overflow nor give nan."""
    monkeypatch.setitem(module._TILE, "cpu", (4, 8))
    hidden, weight, bias, targets = setup(3)
    bias = torch.linspace(-2e3, 2e3, VOCAB_SIZE)
    rows = group_by_row(targets, CPU)
    one, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found, entropy = target_logprobs(one, Head(weight, bias), rows)
    expected = plain(other, weight, bias, targets)[rows.order]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
    assert bool(entropy.isfinite().all())
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)


def test_without_a_gradient_the_values_are_the_same() -> None:
    hidden, weight, bias, targets = setup(4)
    rows = group_by_row(targets, CPU)
    plain_values = target_logprobs(hidden, Head(weight, bias), rows)
    with_gradient = target_logprobs(hidden.clone().requires_grad_(), Head(weight, bias), rows)
    for one, other in zip(plain_values, with_gradient, strict=True):
        assert torch.equal(one, other)


def test_memory_grows_with_the_targets_and_not_with_the_vocabulary() -> None:
    """512 targets over 150,000 tokens would take 307 MB of logits; no allocation comes near it."""
    size, vocab_size = 512, 150_000
    rows = TargetRows(
        queries=torch.arange(size), temperatures=torch.ones(size), order=torch.arange(size), rows=torch.arange(size),
        token_ids=torch.arange(size), starts=list(range(size + 1)),
    )  # fmt: skip
    weight = torch.randn(vocab_size, 4, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(size, 4).requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        target_logprobs(hidden, Head(weight, None), rows)[0].sum().backward()
        logprobs, entropy = target_logprobs(hidden, Head(weight, None), rows, entropy_gradient=True)
        (logprobs.sum() + entropy.sum()).backward()
    largest = max(event.cpu_memory_usage for event in profiler.events())
    assert largest < 20e6


def test_rows_are_unique_and_ordered() -> None:
    *_, targets = setup(2)
    rows = group_by_row(targets, CPU)
    pairs = list(zip(rows.queries.tolist(), rows.temperatures.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    for row, (start, end) in enumerate(itertools.pairwise(rows.starts)):
        assert set(rows.rows[start:end].tolist()) == {row}
        assert {int(targets.queries[i]) for i in rows.order[start:end]} == {pairs[row][0]}
    assert sorted(rows.order.tolist()) == list(range(len(targets.queries)))
