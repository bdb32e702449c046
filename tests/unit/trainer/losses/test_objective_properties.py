"""What must not matter to any objective: the order of samples, how they are packed, who computes them, repetition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art.config import (
    CispoConfig,
    DistillConfig,
    DpoConfig,
    DppoConfig,
    GspoConfig,
    KlConfig,
    LossConfig,
    MismatchConfig,
    PpoConfig,
    ReinforceConfig,
    SftConfig,
    TrainConfig,
)
from art.protocol.samples import TrainingSample
from tests.support.objective_bench import Bench, relative_error
from tests.support.objective_rollouts import plan

TOLERANCE = 1e-5
GATE = MismatchConfig(low=0.85, high=1.2, token_low=0.2, token_high=5.0, mask_token_high=1.5, abort=1.0)


def config(*terms: LossConfig, **fields: object) -> TrainConfig:
    return TrainConfig(**{"loss": terms, "mismatch": None} | fields)


CONFIGS = {
    "dppo": config(DppoConfig(mask_low=0.004, mask_high=0.004)),
    "ppo": config(PpoConfig(), normalize="group"),
    "gspo": config(GspoConfig(clip_low=0.05, clip_high=0.1), normalize="rollout"),
    "cispo": config(CispoConfig(clip_low=0.3, clip_high=0.3), normalize="constant", constant_tokens=20),
    "reinforce": config(ReinforceConfig()),
    "sft": config(SftConfig()),
    "distill": config(DistillConfig(teacher="p/t")),
    "dpo": config(DpoConfig(pairs="all"), mismatch=MismatchConfig(low=0.75, high=1.3, abort=1.0)),
    "kl": config(PpoConfig(), KlConfig(weight=0.3)),
    "kl in the reward": config(PpoConfig(), KlConfig(weight=0.3, where="reward", reference=1), normalize="rollout"),
    "gate": config(PpoConfig(), mismatch=GATE),
}
WITHOUT_OWN_PULL = ["dppo", "ppo", "gspo", "cispo", "reinforce", "sft", "gate"]


@pytest.mark.parametrize("name", CONFIGS)
def test_order_packing_and_workers_change_nothing(name: str, bench: Bench) -> None:
    samples, pairs = plan(bench.rollouts(5), CONFIGS[name])
    expected, record = bench.gradient(samples, pairs, CONFIGS[name])
    assert len(record.micro_batches) == 1

    @settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        ordered=st.permutations(samples),
        # 1 gives every sample a micro-batch of its own, so that nothing is merged.
        max_tokens=st.sampled_from([1, 20, 60, 4096]),
        num_shares=st.integers(1, 5),
    )
    def check(ordered: Sequence[TrainingSample], max_tokens: int, num_shares: int) -> None:
        found, parts = bench.gradient(ordered, pairs[::-1], CONFIGS[name], max_tokens=max_tokens, num_shares=num_shares)
        assert relative_error(found, expected.double()) < TOLERANCE
        assert math.fsum(parts.losses) == pytest.approx(record.losses[0], rel=1e-4, abs=1e-6)

    check()


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_shared_equals_everything_merged(name: str, bench: Bench) -> None:
    samples, pairs = plan(bench.rollouts(6), CONFIGS[name])
    merged, tree = bench.gradient(samples, pairs, CONFIGS[name])
    alone, rows = bench.gradient(samples, pairs, CONFIGS[name], max_tokens=1)
    assert len(rows.micro_batches) == len(samples)
    assert tree.num_tree_tokens < rows.num_tree_tokens
    assert relative_error(alone, merged.double()) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_twice_the_same_with_half_the_weight(name: str, bench: Bench) -> None:
    """Identical rollouts merge in the tree, and each counts by its weight. DPO means over pairs and has no weights."""
    samples, pairs = plan(bench.rollouts(7), CONFIGS[name])
    expected, single = bench.gradient(samples, pairs, CONFIGS[name])
    twice = [
        replace(
            sample,
            sample_id=f"{copy} {sample.sample_id}",
            rollout_id=f"{copy} {sample.rollout_id}",
            weight=sample.weight / 2,
            share=None if sample.share is None else sample.share / 2,
        )
        for copy in ("a", "b")
        for sample in samples
    ]
    doubled_pairs = [(f"{copy} {chosen}", f"{copy} {rejected}") for copy in ("a", "b") for chosen, rejected in pairs]
    found, double = bench.gradient(twice, doubled_pairs, CONFIGS[name])
    assert double.num_tree_tokens == single.num_tree_tokens
    assert relative_error(found, expected.double()) < TOLERANCE
    assert double.losses == pytest.approx(single.losses, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", WITHOUT_OWN_PULL)
def test_no_advantage_no_gradient(name: str, bench: Bench) -> None:
    samples, pairs = plan(bench.rollouts(8), CONFIGS[name])
    silent = [replace(sample, advantages=[0.0] * len(sample.token_ids)) for sample in samples]
    gradient, record = bench.gradient(silent, pairs, CONFIGS[name])
    assert torch.count_nonzero(gradient) == 0
    assert record.losses == [0.0]


@pytest.mark.parametrize("name", ["distill", "kl", "kl in the reward"])
def test_pulls_of_their_own_need_no_advantage(name: str, bench: Bench) -> None:
    samples, pairs = plan(bench.rollouts(8), CONFIGS[name])
    silent = [replace(sample, advantages=[0.0] * len(sample.token_ids)) for sample in samples]
    gradient, _ = bench.gradient(silent, pairs, CONFIGS[name])
    assert torch.count_nonzero(gradient) > 0
