"""How rewards and advantages of a step are spread, and how many answers were cut off: metrics of its request."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from art.runtime.samples import ResolvedTrajectory
from art.trainer.catalogue import describe
from art.trainer.types import TrainingSample


def describe_rollouts(trajectories: Sequence[ResolvedTrajectory]) -> dict[str, float]:
    """`data/reward_...` of all submitted rollouts (at least one), and the share with an answer that was cut off."""
    truncated = sum(
        any(answer.exchange.finish_reason == "length" for path in trajectory.paths for answer in path.answers)
        for trajectory in trajectories
    )
    return {
        "data/step_truncated_share": truncated / len(trajectories),
        **describe("data/reward", [trajectory.reward for trajectory in trajectories]),
    }


def describe_advantages(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """`data/advantage_...` of the trained rollouts (at least one), where a rollout's is the mean of its tokens."""
    by_rollout: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        by_rollout[sample.rollout_id] += itertools.compress(sample.advantages, sample.loss_mask)
    return describe("data/advantage", [math.fsum(values) / len(values) for values in by_rollout.values()])
