"""The gate judges a rollout as a whole wherever its branches are computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from art.config import DppoConfig, LoraConfig, MismatchConfig, TrainerConfig
from art.errors import TrainingError
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step import update as module
from art.trainer.step.measure import target_logprobs_in_order
from art.trainer.step.micro_batch import make_micro_batch, split_micro_batches
from art.trainer.step.step_metrics import StepRecord
from art.trainer.step.update import Update, compute_gradient
from art.trainer.tree.tree import SamplePath, check_sample
from tests.support.trainer_samples import VOCAB_SIZE, make_gate, make_sample

NUM_ROLLOUTS, NUM_TOKENS = 20, 8


@pytest.fixture
def policy(model_path: Callable[[str], str]) -> LoraPolicy:
    base = load_base_model(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))
    policy = LoraPolicy(base, LoraConfig(rank=4, alpha=8))
    policy.values.copy_(torch.randn(policy.values.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
    return policy


def make_paths(policy: LoraPolicy, offsets: tuple[float, float]) -> list[SamplePath]:
    """Rollouts of two branches that share nothing. The sampler is the policy itself, but for one rollout: there the
    log-ratios of the two branches are `offsets`."""
    rng = random.Random(0)
    samples = []
    for number in range(2 * NUM_ROLLOUTS):
        tokens = [number % 50, *(rng.randrange(VOCAB_SIZE) for _ in range(NUM_TOKENS - 1))]
        samples.append(make_sample(f"s{number}", tokens, rng, rollout_id=f"r{number // 2}"))
    paths = [path for sample in samples if (path := check_sample(sample, vocab_size=VOCAB_SIZE))]
    with torch.no_grad():
        micro_batch = make_micro_batch(paths, policy.base)
        own = target_logprobs_in_order(micro_batch, policy.base, policy.hidden_states)
    ends = np.cumsum([len(path.query_positions) for path in paths])
    paths = [replace(path, sampling_logprobs=part) for path, part in zip(paths, np.split(own, ends[:-1]), strict=True)]
    changed = [
        replace(path, sampling_logprobs=path.sampling_logprobs - o) for path, o in zip(paths[:2], offsets, strict=True)
    ]
    return [*changed, *paths[2:]]


def run(
    policy: LoraPolicy, paths: list[SamplePath], gate: MismatchConfig, *, max_tokens: int
) -> tuple[torch.Tensor, StepRecord]:
    update = Update(paths=paths, learning_rate=1.0, terms=(DppoConfig(),), mismatch=make_gate(paths, gate))
    record = StepRecord()
    compute_gradient(policy, update, split_micro_batches(paths, policy.base, max_tokens=max_tokens), record)
    return policy.grads.clone(), record


@pytest.mark.parametrize(
    ("offsets", "gate", "num_masked"),
    [
        pytest.param((0.5, -0.5), MismatchConfig(low=0.7, high=1.4), 0, id="parts outside, whole inside"),
        pytest.param((0.05, 0.05), MismatchConfig(), 1, id="parts could be noise, the whole is not"),
        pytest.param((0.0, 5.0), MismatchConfig(), 1, id="one branch has an outlier"),
    ],
)
def test_branches_in_different_micro_batches_are_one_rollout(
    offsets: tuple[float, float],
    gate: MismatchConfig,
    num_masked: int,
    policy: LoraPolicy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = make_paths(policy, offsets)
    whole, record = run(policy, paths, gate, max_tokens=4096)
    assert len(record.micro_batches) == 1
    assert (record.num_gated, record.num_mismatched) == (NUM_ROLLOUTS, num_masked)
    silent = [replace(path, advantages=0 * path.advantages) for path in paths[:2]] if num_masked else paths[:2]
    expected, _ = run(
        policy, [*silent, *paths[2:]], gate.model_copy(update={"low": 1e-9, "high": 1e9}), max_tokens=4096
    )
    passes = 0
    backward = module._backward

    def counted(*args: object, **options: object) -> float:
        nonlocal passes
        passes += 1
        return backward(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_backward", counted)
    parts, cut = run(policy, paths, gate, max_tokens=1)
    assert len(cut.micro_batches) == 2 * NUM_ROLLOUTS
    # All are computed again if a part was judged otherwise, which depends on whether it came early.
    assert passes in ([4 * NUM_ROLLOUTS] if num_masked == 0 else [2 * NUM_ROLLOUTS, 4 * NUM_ROLLOUTS])
    for gradient in (whole, parts):
        assert float((gradient - expected).norm() / expected.norm()) < 1e-5
    for name in ("num_gated", "num_mismatched", "num_mismatched_targets"):
        assert getattr(cut, name) == getattr(record, name)
    assert cut.losses == pytest.approx(record.losses, rel=1e-5)
    assert cut.gate_noise[0] == pytest.approx(record.gate_noise[0], rel=1e-4)


def test_without_a_mismatch_nothing_is_computed_twice(policy: LoraPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make_paths(policy, (0.0, 0.0))
    monkeypatch.setattr(module, "_log", None)  # would be asked to say that it happens
    _, record = run(policy, paths, MismatchConfig(), max_tokens=1)
    assert (len(record.micro_batches), record.num_mismatched) == (2 * NUM_ROLLOUTS, 0)
    assert record.gate_noise[0][0] < 1e-4


def test_a_step_that_is_wrong_is_stopped_however_it_is_cut(policy: LoraPolicy) -> None:
    paths = [replace(path, sampling_logprobs=path.sampling_logprobs + 0.5) for path in make_paths(policy, (0.0, 0.0))]
    messages = set()
    for max_tokens in (1, 40, 4096):
        with pytest.raises(TrainingError, match="20 of 20 rollouts") as error:
            run(policy, paths, MismatchConfig(), max_tokens=max_tokens)
        messages.add(error.value.message)
    assert len(messages) == 1
