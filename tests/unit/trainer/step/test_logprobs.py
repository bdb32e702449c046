from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from art.config import DppoConfig, LoraConfig, TrainerConfig
from art.protocol.samples import ConstrainedSpan, Constraint
from art.trainer import logprobs as module
from art.trainer.logprobs import Head, TargetRows, group_by_row, operand, target_logprobs
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.full import FullPolicy
from art.trainer.policy.lora import LoraPolicy
from art.trainer.policy.policy import Policy
from art.trainer.step.micro_batch import make_micro_batch, split_micro_batches, target_logprobs_in_order
from art.trainer.step.record import StepRecord
from art.trainer.step.update import Update, compute_gradient
from art.trainer.tree import Targets, VocabularyMask, build_tree
from tests.support.constrained_samples import replayed, with_kept
from tests.support.trainer_reference import reference_gradient, sequence_logprobs
from tests.support.trainer_samples import VOCAB_SIZE, paths_of, random_samples

HIDDEN_SIZE = 16
CPU = torch.device("cpu")


def setup(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, object]:
    paths = paths_of(random_samples(seed, count=10))
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


def test_the_gradient_of_the_entropy_is_that_of_finite_differences() -> None:
    hidden, weight, bias, targets = setup(6)
    rows = group_by_row(targets, CPU)
    step = 1e-2 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(7))

    def entropies(hidden: torch.Tensor) -> torch.Tensor:
        return target_logprobs(hidden, Head(weight, bias), rows, entropy_gradient=True)[1]

    leaf = hidden.clone().requires_grad_()
    entropies(leaf).sum().backward()
    difference = (entropies(hidden + step) - entropies(hidden - step)).double().sum() / 2
    assert float((leaf.grad * step).sum()) == pytest.approx(float(difference), rel=2e-3)


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


# -- bfloat16 products, on the CPU and on CUDA --


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
def test_masked_rows_use_the_same_products(device: str) -> None:
    """bfloat16 against float64 over the allowed tokens."""
    paths = paths_of(random_samples(0, count=10))
    targets = build_tree(paths).targets
    allowed = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    allowed[::3] = allowed[torch.from_numpy(targets.token_ids)] = True
    mask = VocabularyMask.from_ids(allowed.nonzero()[:, 0].int().numpy(), VOCAB_SIZE)
    targets = replace(targets, masks=0 * targets.masks, mask_table=[mask])
    rows = group_by_row(targets, torch.device(device))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB_SIZE, 16, generator=generator).bfloat16().to(device)
    hidden = torch.randn(int(targets.queries.max()) + 1, 16, generator=generator).bfloat16().to(device)
    leaf, right = hidden.clone().requires_grad_(), hidden.double().cpu().requires_grad_()
    logprobs = rows.spread(target_logprobs(leaf, Head(weight, None), rows)[0])
    logits = right[targets.queries] @ weight.double().cpu().T / torch.from_numpy(targets.temperatures)[:, None]
    logits = logits.masked_fill(~allowed, float("-inf"))
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(targets.token_ids)[:, None])[:, 0]
    assert (logprobs - expected).abs().max() < 1e-5
    logprobs.sum().backward()
    expected.sum().backward()
    error = (leaf.grad.double().cpu() - right.grad).norm() / right.grad.norm()
    assert error < UNIT_ROUNDOFF


def test_what_is_multiplied() -> None:
    """bfloat16 numbers are rounded on the CPU too, where they are multiplied as float32 numbers."""
    high = torch.full((2, 2), 1 + 2**-12)
    assert torch.equal(operand(high, torch.float32), high)
    assert torch.equal(operand(high, torch.bfloat16), torch.ones(2, 2))
    assert operand(high, torch.bfloat16).dtype == torch.float32


def test_on_cuda_torch_takes_these_products() -> None:
    """Shapes and types on a pretended device: `out_dtype` exists for matrices and `out`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        left = torch.empty(3, 4, dtype=torch.bfloat16, device="cuda")
        assert operand(left, torch.bfloat16).dtype == torch.bfloat16
        out = torch.empty(3, 3, device="cuda")
        assert module.multiply(left, left.T, out=out).dtype == torch.float32
        module.add_product(out, left, left.T)


# -- rows that are normalised over a part of the vocabulary --


TILES = [(1, 1), (3, 7), (4, 10_000), (512, 2**19)]


def masked_targets(seed: int) -> tuple[int, Targets]:
    tree = build_tree(replayed(with_kept(random_samples(seed, count=20), seed)))
    assert len(set(tree.targets.masks.tolist())) > 10
    assert min(tree.targets.masks) == -1
    return len(tree), tree.targets


def head(seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    return weight.to(dtype), torch.randn(VOCAB_SIZE, generator=generator).to(dtype)


def allowed(targets: Targets) -> torch.Tensor:
    """[N, V]"""
    rows = np.ones((len(targets.masks), VOCAB_SIZE), dtype=np.bool_)
    for row, number in zip(rows, targets.masks.tolist(), strict=True):
        if number >= 0:
            row[:] = [token in targets.mask_table[number] for token in range(VOCAB_SIZE)]
    return torch.from_numpy(rows)


def exact_over_allowed(logits: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [N] in float64 of logits [T, V]."""
    rows = logits.double()[targets.queries] / torch.from_numpy(targets.temperatures).double()[:, None]
    logprobs = rows.masked_fill(~allowed(targets), float("-inf")).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(~allowed(targets), 0.0)).sum(-1)
    return logprobs.gather(1, torch.from_numpy(targets.token_ids)[:, None])[:, 0], entropy


def ours(
    hidden: torch.Tensor, head: Head, targets: Targets, rows: TargetRows | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows or group_by_row(targets, CPU)
    logprobs, entropy = target_logprobs(hidden, head, rows)
    return rows.spread(logprobs), rows.spread(entropy.index_select(0, rows.rows))


@pytest.mark.parametrize("tile", TILES)
def test_values_and_gradients_equal_float64(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._TILE, "cpu", tile)
    size, targets = masked_targets(1)
    weight, bias = head(1)
    hidden = torch.randn(size, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    one, other = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    found, entropy = ours(one, Head(weight, bias), targets)
    expected, expected_entropy = exact_over_allowed(other @ weight.double().T + bias.double(), targets)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy.detach(), rtol=1e-5, atol=1e-5)
    coefficients = torch.linspace(-1, 1, len(found))
    (found * coefficients).sum().backward()
    (expected * coefficients.double()).sum().backward()
    error = (one.grad.double() - other.grad).abs().max() / other.grad.abs().max()
    assert error <= 5e-6


@pytest.mark.parametrize(
    ("softcap", "tile"),
    [
        pytest.param(softcap, tile, marks=[pytest.mark.slow] if softcap is None and tile == (1, 1) else [])
        for softcap in (None, 4.0)
        for tile in TILES
    ],
)
def test_gradients_of_the_entropy_equal_float64(
    tile: tuple[int, int], softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With log-probs in the same loss, temperatures, masks of all kinds, and rows that no loss reads."""
    monkeypatch.setitem(module._TILE, "cpu", tile)
    size, targets = masked_targets(1)
    weight, bias = head(1)
    hidden = torch.randn(size, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    one, other = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    rows = group_by_row(targets, CPU)
    logprobs, entropy = target_logprobs(one, Head(weight, bias, softcap=softcap), rows, entropy_gradient=True)
    logprobs, entropy = rows.spread(logprobs), rows.spread(entropy.index_select(0, rows.rows))
    logits = other @ weight.double().T + bias.double()
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    expected, expected_entropy = exact_over_allowed(logits, targets)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    of_logprobs, of_entropy = torch.linspace(-1, 1, len(logprobs)), torch.linspace(2, -1, len(logprobs)).clamp(min=0)
    for reads_logprobs in (0.0, 1.0):
        parts = zip((logprobs, expected), (entropy, expected_entropy), (one, other), strict=True)
        found, right = (
            torch.autograd.grad(((reads_logprobs * of_logprobs * lp) + of_entropy * s).sum(), leaf, retain_graph=True)[
                0
            ]
            for lp, s, leaf in parts
        )
        assert (found.double() - right).abs().max() / right.abs().max() <= 5e-6


@pytest.mark.parametrize("tile", TILES)
def test_tiles_without_an_allowed_token_leave_no_trace(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last tokens are allowed, and the others' logits are 2,000 above theirs."""
    monkeypatch.setitem(module._TILE, "cpu", tile)
    size, targets = masked_targets(3)
    last = VocabularyMask.from_ids(np.arange(VOCAB_SIZE - 5, VOCAB_SIZE, dtype=np.int32), VOCAB_SIZE)
    targets = replace(
        targets, masks=np.zeros_like(targets.masks), mask_table=[last], token_ids=VOCAB_SIZE - 5 + targets.token_ids % 5
    )
    weight, _ = head(3)
    bias = torch.linspace(2e3, 0, VOCAB_SIZE).round()
    hidden = torch.randn(size, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3)).requires_grad_()
    found, entropy = ours(hidden, Head(weight, bias), targets)
    expected, _ = exact_over_allowed(hidden.detach() @ weight.T + bias, targets)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
    found.sum().backward()
    assert bool(entropy.isfinite().all())
    assert bool(hidden.grad.isfinite().all())


def test_a_mask_of_everything_is_no_mask() -> None:
    size, targets = masked_targets(6)
    weight, bias = head(6)
    hidden = torch.randn(size, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    everything = VocabularyMask.from_ids(np.arange(VOCAB_SIZE, dtype=np.int32), VOCAB_SIZE)
    plain = replace(targets, masks=np.full_like(targets.masks, -1), mask_table=())
    masked = replace(targets, masks=np.zeros_like(targets.masks), mask_table=[everything])
    for one, other in zip(*(ours(hidden, Head(weight, bias), each) for each in (plain, masked)), strict=True):
        assert torch.equal(one, other)


# -- rows --


def test_samples_with_equal_tokens_and_different_masks_share_a_hidden_state_and_no_row() -> None:
    sample = random_samples(0)[0]
    kept = [sorted({token, 7, 11}) for token in sample.token_ids[1:]]
    span = ConstrainedSpan(start=1, num_tokens=len(kept), constraint=Constraint(kept=kept))
    pair = [replace(sample, constraints=[]), replace(sample, sample_id="other", constraints=[span])]
    tree = build_tree(replayed(pair))
    assert len(tree) == len(replayed(pair)[0].token_ids)
    rows = group_by_row(tree.targets, CPU)
    assert len(rows.queries) == 2 * len(set(rows.queries.tolist()))
    assert group_by_row(build_tree(replayed([pair[0]] * 2)).targets, CPU).masks is None


def test_forced_tokens_have_no_row_no_log_prob_and_no_gradient() -> None:
    samples = []
    for sample in random_samples(1):
        forced = [[token] for token in sample.token_ids[1:]]
        span = ConstrainedSpan(start=1, num_tokens=len(forced), constraint=Constraint(kept=forced))
        samples.append(replace(sample, constraints=[span]))
    tree = build_tree(replayed(samples))
    rows = group_by_row(tree.targets, CPU)
    assert (len(rows.queries), rows.num_forced) == (0, len(tree.targets.queries))
    hidden = torch.randn(len(tree), HIDDEN_SIZE).requires_grad_()
    weight, bias = head(0)
    found, entropy = ours(hidden, Head(weight, bias), tree.targets, rows)
    assert found.tolist() == entropy.tolist() == [0.0] * len(tree.targets.queries)
    found.sum().backward()
    assert hidden.grad.abs().max() == 0


# -- policies --


@pytest.fixture(scope="module")
def policies(model_path: Callable[[str], str]) -> dict[str, Policy]:
    base = load_base_model(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))
    lora = LoraPolicy(base, LoraConfig(rank=8, alpha=16))
    lora.values.copy_(torch.randn(lora.values.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
    whole = load_base_model(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))
    return {"lora": lora, "full": FullPolicy(whole)}


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("max_tokens", [4096, 20])
def test_the_gradient_of_a_tree_equals_that_of_its_sequences(
    kind: str, max_tokens: int, policies: dict[str, Policy]
) -> None:
    policy, samples = policies[kind], with_kept(random_samples(9, count=12))
    paths = replayed(samples)
    assert sum(len(path.query_positions) for path in paths if path.masks is not None) > 20
    update = Update(paths=paths, learning_rate=1.0, terms=(DppoConfig(),))
    record = StepRecord()
    compute_gradient(policy, update, split_micro_batches(paths, policy.base, max_tokens=max_tokens), record)
    reference = reference_gradient(policy, samples, DppoConfig())
    assert float((policy.grads.double() - reference.double()).norm() / reference.double().norm()) < 1e-5
    for path, logprobs in zip(paths, np.split(_policy_logprobs(policy, paths), _ends(paths)), strict=True):
        expected = sequence_logprobs(policy, dict(policy.tensors), path.sample)
        np.testing.assert_allclose(logprobs, expected[path.query_positions].detach().numpy(), atol=1e-5)


def _policy_logprobs(policy: Policy, paths: list) -> np.ndarray:
    with torch.no_grad():
        return target_logprobs_in_order(make_micro_batch(paths, policy.base), policy.base, policy.hidden_states)


def _ends(paths: list) -> np.ndarray:
    return np.cumsum([len(path.query_positions) for path in paths])[:-1]
