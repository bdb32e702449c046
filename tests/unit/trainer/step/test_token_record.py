"""The token file of a step against a plain forward pass, the losses' own formulas, and the ledger's counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from art.config import (
    CispoConfig,
    DpoConfig,
    DppoConfig,
    LoraConfig,
    MismatchConfig,
    ReinforceConfig,
    TrainConfig,
    TrainerConfig,
    TrainSFTConfig,
)
from art.protocol.calls import Train, TrainSft
from art.protocol.samples import ConstrainedSpan, Constraint, StepResult, TrainingSample
from art.storage.step_files import NAME, TokenFile, TokenReason
from art.trainer.policy.policy import Policy
from art.trainer.trainer import Trainer
from tests.support.constrained_samples import with_kept
from tests.support.trainer_reference import _distributions, with_own_logprobs
from tests.support.trainer_samples import random_samples

HALF = {"rel": 2e-3, "abs": 2e-3}
"""Rounding to float16, and float32 noise of another order of summation."""
LENIENT = MismatchConfig(rollouts=(1e-9, 1e9), tokens=(1e-9, 1e9), abort=1.0)


@pytest.fixture(scope="module")
def trainer(model_path: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A trainer whose checkpoint `start` has an adapter that does something."""
    trainer = Trainer(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1, max_tokens=64))
    root = tmp_path_factory.mktemp("start")
    trainer.start = root / "0001"  # type: ignore[attr-defined]
    trainer.init_checkpoint(root / "0000", LoraConfig(rank=8, alpha=16))
    config = TrainConfig(learning_rate=3e-2, mismatch=None)
    trainer.train(
        Train(samples=random_samples(1), config=config, from_checkpoint=root / "0000", to_checkpoint=root / "0001",
              job_id="job-00000001")
    )  # fmt: skip
    return trainer


def policy_of(trainer: Trainer) -> Policy:
    return trainer._resident.load(trainer.start).policy  # type: ignore[attr-defined]


def train(
    trainer: Trainer, folder: Path, samples: list[TrainingSample], config: Any, **changes: Any
) -> tuple[TokenFile, StepResult]:
    kind = TrainSft if isinstance(config, TrainSFTConfig) else Train
    arguments = {"samples": samples, "config": config, "from_checkpoint": trainer.start, "job_id": "job-00000002"}  # type: ignore[attr-defined]
    arguments |= {"to_checkpoint": folder / "0002", "record_to": folder / "steps/0002"}
    result = trainer.train(kind(**arguments | changes))
    return TokenFile(folder / "steps/0002"), result


def by_sample(tokens: TokenFile) -> dict[str, dict[str, np.ndarray]]:
    return {sample.sample_id: tokens.read(number) for number, sample in enumerate(tokens.samples)}


def places(sample: TrainingSample) -> list[int]:
    return [place for place, wanted in enumerate(sample.loss_mask) if wanted]


@pytest.mark.parametrize("constrained", [False, True])
def test_logprobs_and_entropies_are_those_of_a_plain_forward_pass(
    trainer: Trainer, tmp_path: Path, constrained: bool
) -> None:
    samples = random_samples(2, 12)
    samples = with_kept(samples) if constrained else samples
    samples[3] = replace(samples[3], component="sft", advantages=[0.0] * len(samples[3].token_ids))
    samples[5] = replace(samples[5], component="observation", advantages=[0.0] * len(samples[5].token_ids))
    policy = policy_of(trainer)
    with torch.no_grad():
        expected = {sample.sample_id: _distributions(policy, dict(policy.tensors), sample) for sample in samples}
    tokens, _ = train(trainer, tmp_path, samples, TrainConfig(learning_rate=1e-3, mismatch=None))
    values = by_sample(tokens)
    for sample in samples:
        rows = expected[sample.sample_id][[place - 1 for place in places(sample)]]
        learnt = torch.tensor([sample.token_ids[place] for place in places(sample)])
        logprobs = rows.gather(1, learnt[:, None])[:, 0].numpy()
        found = values[sample.sample_id]
        assert found["policy_logprobs"] == pytest.approx(logprobs, **HALF)
        entropies = -(rows.exp() * rows.clamp(min=-1e30)).sum(-1).numpy()
        assert found["entropy"] == pytest.approx(entropies, **HALF)
        if sample.component == "rl":
            ratios = logprobs - np.asarray([sample.sampling_logprobs[place] for place in places(sample)])
            assert found["log_ratios"] == pytest.approx(ratios, **HALF)
        else:
            assert np.isnan(found["log_ratios"]).all()


@pytest.mark.parametrize("term", [ReinforceConfig(), CispoConfig()])
def test_the_loss_follows_from_what_is_recorded(trainer: Trainer, tmp_path: Path, term: Any) -> None:
    """Sum of scale * loss over the tokens, with ratio, advantage and log-prob from the file, is `loss/train`."""
    samples = with_own_logprobs(policy_of(trainer), random_samples(4, 10))
    rng = np.random.default_rng(0)
    samples = [
        replace(one, sampling_logprobs=[p + rng.normal(0, 0.3) if p else 0.0 for p in one.sampling_logprobs])
        for one in samples
    ]
    config = TrainConfig(learning_rate=1e-3, mismatch=None, loss=term)
    tokens, result = train(trainer, tmp_path, samples, config)
    total = 0.0
    for number, sample in enumerate(tokens.samples):
        values = {name: column.astype(np.float64) for name, column in tokens.read(number).items()}
        ratio = np.exp(values["log_ratios"])
        weight = np.minimum(ratio, 1 + term.clip_high) if isinstance(term, CispoConfig) else ratio
        total += float((sample.scale * -weight * values["advantages"] * values["policy_logprobs"]).sum())
    assert total == pytest.approx(result.metrics["loss/train"], rel=5e-3, abs=2e-3)


def test_reasons_are_the_masks_of_the_gate(trainer: Trainer, tmp_path: Path) -> None:
    policy = policy_of(trainer)
    samples = [replace(s, temperature=1.0) for s in with_own_logprobs(policy, random_samples(7, 14))]
    samples = with_own_logprobs(policy, samples)

    def shifted(sample: TrainingSample, amount: float, count: int) -> TrainingSample:
        chosen = places(sample)[:count]
        moved = [p + amount if i in chosen else p for i, p in enumerate(sample.sampling_logprobs)]
        return replace(sample, sampling_logprobs=moved)

    samples[0] = shifted(samples[0], 3.0, 99)  # the rollout is another policy's
    samples[1] = shifted(samples[1], -1.0, 1)  # ratio e: truncated to 2
    samples[2] = shifted(samples[2], 1.0, 1)  # ratio 1 / e: below the bound for tokens
    samples[3] = replace(samples[3], advantages=[0.0] * len(samples[3].token_ids))
    gate = MismatchConfig(rollouts=(0.1, 10), tokens=(1e-9, 1e9), abort=1.0, truncate=2.0, mask_tokens=(0.5, 1e8))
    config = TrainConfig(learning_rate=1e-3, mismatch=gate, anchor="step_start", loss=ReinforceConfig())
    tokens, result = train(trainer, tmp_path, samples, config)
    found = {name: values["reasons"].tolist() for name, values in by_sample(tokens).items()}
    rest = [int(TokenReason.TRAINED)]
    assert found["s0"] == [TokenReason.MISMATCHED_ROLLOUT] * len(places(samples[0]))
    assert found["s1"][0] == TokenReason.TRUNCATED
    assert found["s2"][0] == TokenReason.MISMATCHED_TOKEN
    assert set(found["s1"][1:] + found["s2"][1:]) <= set(rest)
    assert set(found["s3"]) == {TokenReason.NO_ADVANTAGE}
    assert all(set(found[f"s{n}"]) == set(rest) for n in range(4, 14))
    dropped = tokens.count_dropped()
    assert dropped == {"s0": {"sampler_mismatch": len(places(samples[0]))}, "s2": {"sampler_mismatch": 1}}
    counted = sum(counts["sampler_mismatch"] for counts in dropped.values())
    assert counted == result.metrics["offpolicy/mismatch_masked_tokens"]


def test_tokens_that_the_loss_clips_are_told_from_those_it_learns(trainer: Trainer, tmp_path: Path) -> None:
    samples = random_samples(8, 12)
    config = TrainConfig(learning_rate=1e-3, mismatch=None, loss=DppoConfig(max_move=0.05))
    tokens, result = train(trainer, tmp_path, samples, config)
    clipped = 0
    for number in range(len(tokens.samples)):
        values = tokens.read(number)
        policy = values["policy_logprobs"].astype(np.float64)
        moved = np.exp(policy) - np.exp(policy - values["log_ratios"])
        sure = np.abs(np.abs(moved) - 0.05) > 2e-3  # float16 decides nothing near the bound
        beyond = (values["advantages"] * moved > 0) & (np.abs(moved) > 0.05)
        assert (((values["reasons"] == TokenReason.CLIPPED) == beyond) | ~sure).all()
        clipped += int((values["reasons"] == TokenReason.CLIPPED).sum())
    assert clipped > 5
    share = result.metrics["loss/masked_share"] * result.metrics["data/step_trainable_tokens"]
    reasons = tokens.read_all(["reasons"])["reasons"]
    assert round(share) == int(np.isin(reasons, [TokenReason.CLIPPED, TokenReason.CAPPED]).sum())


def test_refused_and_forced_tokens(trainer: Trainer, tmp_path: Path) -> None:
    samples = [replace(s, loss_mask=[False] + [True] * (len(s.token_ids) - 1)) for s in random_samples(10)]
    other = [(samples[0].token_ids[1] + 1) % 61]
    samples[0] = replace(
        samples[0], constraints=[ConstrainedSpan(start=1, num_tokens=1, constraint=Constraint(kept=[other]))]
    )
    only = [[samples[1].token_ids[1]]]
    samples[1] = replace(
        samples[1], constraints=[ConstrainedSpan(start=1, num_tokens=1, constraint=Constraint(kept=only))]
    )
    tokens, result = train(trainer, tmp_path, samples, TrainConfig(learning_rate=1e-3, mismatch=None))
    last = tokens.samples[-1]
    assert (last.sample_id, last.is_refused, tokens.read(len(tokens.samples) - 1)) == ("s0", True, {})
    assert tokens.count_dropped() == {"s0": {"constraint_mismatch": len(samples[0].token_ids) - 1}}
    assert result.metrics["offpolicy/constraint_refused_tokens"] == len(samples[0].token_ids) - 1
    forced = by_sample(tokens)["s1"]
    assert (forced["reasons"][0], forced["policy_logprobs"][0]) == (TokenReason.FORCED, 0.0)
    assert TokenReason.FORCED not in forced["reasons"][1:]


def test_rollouts_without_their_counterpart_are_counted_as_the_ledger_counts_them(
    trainer: Trainer, tmp_path: Path
) -> None:
    own = with_own_logprobs(policy_of(trainer), random_samples(11, 6))
    samples = [replace(sample, policy_version=1) for sample in own]  # of the checkpoint that the step starts from
    spoilt = [p - 5.0 if p else 0.0 for p in samples[0].sampling_logprobs]
    samples[0] = replace(samples[0], sampling_logprobs=spoilt)
    config = TrainConfig(learning_rate=1e-3, loss=DpoConfig(), mismatch=MismatchConfig(abort=1.0))
    tokens, result = train(trainer, tmp_path, samples, config, pairs=[("s0", "s1"), ("s2", "s3"), ("s4", "s5")])
    dropped = {name: counts["sampler_mismatch"] for name, counts in tokens.count_dropped().items()}
    assert dropped == {name: len(places(sample)) for name, sample in (("s0", samples[0]), ("s1", samples[1]))}
    assert sum(dropped.values()) == result.metrics["offpolicy/mismatch_masked_tokens"]
    reasons = by_sample(tokens)
    assert set(reasons["s1"]["reasons"]) == {TokenReason.UNPAIRED}
    assert set(reasons["s2"]["reasons"]) == {TokenReason.TRAINED}


def test_a_step_that_is_repeated_has_one_file_with_the_same_content(trainer: Trainer, tmp_path: Path) -> None:
    samples, config = random_samples(13), TrainConfig(learning_rate=1e-3, mismatch=None)
    train(trainer, tmp_path, samples, config)
    first = (tmp_path / "steps/0002" / NAME).read_bytes()
    (tmp_path / "0002").rename(tmp_path / "lost")  # killed between the token file and the checkpoint
    (tmp_path / "steps/0002/.tokens.safetensors.tmp-999999999").write_bytes(b"half")  # and once more while writing
    train(trainer, tmp_path, samples, config)
    assert [path.name for path in (tmp_path / "steps/0002").iterdir()] == [NAME]
    assert (tmp_path / "steps/0002" / NAME).read_bytes() == first


def test_the_index_tells_the_prefix_tree_of_the_step(trainer: Trainer, tmp_path: Path) -> None:
    samples = random_samples(16, 20)
    tokens, result = train(trainer, tmp_path, samples, TrainConfig(learning_rate=1e-3, mismatch=None))
    own = {sample.sample_id: sample.token_ids for sample in samples}
    inputs = [list(own[one.sample_id])[: one.num_inputs] for one in tokens.samples]
    assert inputs == sorted(inputs)
    for before, after, sample in zip(inputs, inputs[1:], tokens.samples[1:], strict=False):
        common = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
        assert sample.shared == (min(len(before), len(after)) if common is None else common)
    # Computed once per forward pass: the shared parts between neighbours of one pass are left out.
    computed = 0
    for number in {sample.micro_batch for sample in tokens.samples}:
        one = [list(own[s.sample_id])[: s.num_inputs] for s in tokens.samples if s.micro_batch == number]
        computed += len({tuple(path[:length]) for path in one for length in range(1, len(path) + 1)})
    assert computed == result.metrics["data/step_trainer_tokens"]
    assert not math.isnan(tokens.samples[0].scale)
