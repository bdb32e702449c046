"""How rewards and advantages of a step are spread, and how many answers were cut off: metrics of its request."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from art.credit.resolve import ResolvedTrajectory
from art.gateway.parsing.tool_calls import has_unread_call
from art.metrics.catalogue import describe
from art.trainer.contract import TrainingSample


def describe_rollouts(trajectories: Sequence[ResolvedTrajectory]) -> dict[str, float]:
    """`data/reward_...` of all submitted rollouts (at least one), how long they are, and how many are no good."""
    exchanges = [
        [answer.exchange for path in trajectory.paths for answer in path.answers] for trajectory in trajectories
    ]
    truncated = sum(any(exchange.finish_reason == "length" for exchange in of_one) for of_one in exchanges)
    malformed = sum(
        trajectory.policy_fault or any(exchange.tools and has_unread_call(exchange.message) for exchange in of_one)
        for trajectory, of_one in zip(trajectories, exchanges, strict=True)
    )
    return {
        "data/step_truncated_share": truncated / len(trajectories),
        "data/step_malformed_share": malformed / len(trajectories),
        "data/step_answers_per_rollout": sum(map(len, exchanges)) / len(trajectories),
        "data/step_tokens_per_rollout": sum(t.sampled_tokens for t in trajectories) / len(trajectories),
        **describe("data/reward", [trajectory.reward for trajectory in trajectories]),
    }


def describe_advantages(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """`data/advantage_...` of the trained rollouts (at least one), where a rollout's is the mean of its tokens."""
    by_rollout: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        by_rollout[sample.rollout_id] += itertools.compress(sample.advantages, sample.loss_mask)
    return describe("data/advantage", [math.fsum(values) / len(values) for values in by_rollout.values()])
