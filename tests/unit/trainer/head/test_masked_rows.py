"""Log-probs over a part of the vocabulary: against float64, and what they must not compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from art.config import DppoConfig, KlConfig, LoraConfig, TrainerConfig
from art.protocol.samples import ConstrainedSpan, Constraint
from art.trainer import head as head_module
from art.trainer.head import Head
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.full import FullPolicy
from art.trainer.policy.lora import LoraPolicy
from art.trainer.policy.policy import Policy
from art.trainer.step import logprobs as module
from art.trainer.step.logprobs import TargetRows, group_by_row, target_logprobs
from art.trainer.step.measure import add_stream, target_logprobs_in_order
from art.trainer.step.micro_batch import MicroBatcher, make_micro_batch, split_micro_batches
from art.trainer.step.step_metrics import StepRecord
from art.trainer.step.update import Update, compute_gradient
from art.trainer.tree import tree
from art.trainer.tree.tree import Targets, VocabularyMask, build_tree
from tests.support.constrained_samples import replayed, with_kept
from tests.support.trainer_reference import reference_gradient, sequence_logprobs
from tests.support.trainer_samples import VOCAB_SIZE, random_samples

CPU = torch.device("cpu")
HIDDEN_SIZE = 16
TILES = [(1, 1), (3, 7), (4, 10_000), (512, 2**19)]


@pytest.fixture(params=[0, 8, VOCAB_SIZE, None], ids=["in tiles", "both", "gathered", "the faster one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gather the head's rows of masks of up to so many tokens, and compute the others in tiles."""
    if request.param is not None:
        monkeypatch.setattr(tree, "FEW", request.param)
        monkeypatch.setattr(head_module, "GATHER_COST", 0)


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


def exact(logits: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("tile", TILES)
def test_values_and_gradients_equal_float64(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._TILE, "cpu", tile)
    size, targets = masked_targets(1)
    weight, bias = head(1)
    hidden = torch.randn(size, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    one, other = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    found, entropy = ours(one, Head(weight, bias), targets)
    expected, expected_entropy = exact(other @ weight.double().T + bias.double(), targets)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy.detach(), rtol=1e-5, atol=1e-5)
    coefficients = torch.linspace(-1, 1, len(found))
    (found * coefficients).sum().backward()
    (expected * coefficients.double()).sum().backward()
    error = (one.grad.double() - other.grad).abs().max() / other.grad.abs().max()
    assert error <= 5e-6


@pytest.mark.usefixtures("way")
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
    expected, expected_entropy = exact(logits, targets)
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


@pytest.mark.usefixtures("way")
def test_equal_logits_give_equal_log_probs() -> None:
    """The head is the identity, so hidden states are logits, and only the normalisation can round."""
    size, targets = masked_targets(2)
    logits = 4 * torch.randn(size, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    found, _ = ours(
        logits, Head(torch.eye(VOCAB_SIZE), None), replace(targets, temperatures=np.ones_like(targets.weights))
    )
    expected, _ = exact(logits, replace(targets, temperatures=np.ones_like(targets.weights)))
    assert (found.double() - expected).abs().max() <= 2e-6


@pytest.mark.parametrize("tile", TILES)
def test_tiles_without_an_allowed_token_leave_no_trace(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last tokens are allowed, and the others' logits are 2,000 above theirs."""
    monkeypatch.setattr(tree, "FEW", 0)
    monkeypatch.setitem(module._TILE, "cpu", tile)
    size, targets = masked_targets(3)
    last = VocabularyMask.from_ids(np.arange(VOCAB_SIZE - 5, VOCAB_SIZE, dtype=np.int32), VOCAB_SIZE)
    targets = replace(
        targets,
        masks=np.zeros_like(targets.masks),
        mask_table=[last],
        token_ids=VOCAB_SIZE - 5 + targets.token_ids % 5,
    )
    weight, _ = head(3)
    bias = torch.linspace(2e3, 0, VOCAB_SIZE).round()
    hidden = torch.randn(size, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3)).requires_grad_()
    found, entropy = ours(hidden, Head(weight, bias), targets)
    expected, _ = exact(hidden.detach() @ weight.T + bias, targets)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
    found.sum().backward()
    assert bool(entropy.isfinite().all())
    assert bool(hidden.grad.isfinite().all())


def test_many_rows_in_padded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering a few numbers at a time, or everything at once, gives the same."""
    monkeypatch.setattr(head_module, "GATHER_COST", 0)
    size, targets = masked_targets(4)
    weight, bias = head(4)
    hidden = torch.randn(size, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    found = ours(hidden, Head(weight, bias), targets)
    monkeypatch.setitem(head_module._BATCH_ELEMENTS, "cpu", 1)
    again = ours(hidden, Head(weight, bias), targets)
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_bfloat16_head_is_read_in_float32() -> None:
    size, targets = masked_targets(5)
    weight, bias = head(5, torch.bfloat16)
    hidden = torch.randn(size, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3)).bfloat16()
    found, _ = ours(hidden.clone().requires_grad_(), Head(weight, bias), targets)
    expected, _ = exact(hidden.double() @ weight.double().T + bias.double(), targets)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_mask_of_everything_is_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "FEW", 8)
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


@pytest.mark.usefixtures("way")
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


def test_kl_measures_over_the_same_tokens(policies: dict[str, Policy]) -> None:
    """At step 0 policy and base are equal, so any difference would come from the tree."""
    policy = policies["full"]
    paths = replayed(with_kept(random_samples(3, count=12)))
    batcher = MicroBatcher(policy.base, max_tokens=40)
    paths = add_stream(paths, "base", policy.base_hidden_states, batcher)
    update = Update(paths=paths, learning_rate=1.0, terms=(DppoConfig(), KlConfig(weight=0.1, reference="base")))
    record = StepRecord()
    compute_gradient(policy, update, batcher.split(paths), record)
    gaps = [np.abs(part.policy_logprobs - part.base_logprobs).max() for part in record.micro_batches]
    assert max(gaps) < 1e-5
