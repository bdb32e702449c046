"""Metrics of a training request: the spread of its rewards and advantages, and how many answers were cut off."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from art.config import TrainConfig
from art.credit.advantages import overlong_punishment
from art.credit.resolve import ResolvedTrajectory
from art.credit.samples import PlannedSample
from art.metrics.catalogue import describe


def describe_step(
    trajectories: Sequence[ResolvedTrajectory],
    samples: Sequence[PlannedSample],
    config: TrainConfig,
    *,
    step: int,
    num_pairs: int,
) -> dict[str, float]:
    """Describe the submitted trajectories, and the samples and preference pairs trained at `step`, as metrics."""
    metrics: dict[str, float] = {"data/step_num_trajectories": len(trajectories)}
    if samples:
        metrics["offpolicy/max_staleness"] = step - min(sample.policy_version for sample in samples)
    if config.overlong is not None:
        punished = [t for t in trajectories if overlong_punishment(t.sampled_tokens, config.overlong) > 0]
        metrics["data/step_num_trajectories_overlong"] = len(punished)
    metrics |= describe_rollouts(trajectories)
    if num_pairs:
        metrics["data/step_num_pairs"] = num_pairs
    elif samples and config.learns_from_rewards:
        metrics |= _describe_advantages(samples)
    return metrics


def describe_rollouts(trajectories: Sequence[ResolvedTrajectory]) -> dict[str, float]:
    """Describe all submitted rollouts (at least one): rewards, lengths, shares that were cut off or malformed."""
    rollouts = [list(trajectory.answers()) for trajectory in trajectories]
    truncated = sum(trajectory.is_truncated for trajectory in trajectories)
    malformed = sum(
        trajectory.policy_fault or any(answer.is_malformed for answer in answers)
        for trajectory, answers in zip(trajectories, rollouts, strict=True)
    )
    return {
        "data/step_truncated_share": truncated / len(trajectories),
        "data/step_malformed_share": malformed / len(trajectories),
        "data/step_answers_per_rollout": sum(map(len, rollouts)) / len(trajectories),
        "data/step_tokens_per_rollout": sum(t.sampled_tokens for t in trajectories) / len(trajectories),
        **describe("data/reward", [trajectory.reward for trajectory in trajectories]),
    }


def _describe_advantages(samples: Sequence[PlannedSample]) -> dict[str, float]:
    """Describe the advantages of the trained rollouts (at least one); each counts with the mean of its tokens."""
    by_rollout: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for answer in sample.answers:
            by_rollout[sample.rollout_id] += answer.token_advantages().tolist()
    return describe("data/advantage", [math.fsum(values) / len(values) for values in by_rollout.values()])
