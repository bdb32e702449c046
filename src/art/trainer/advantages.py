"""From the rewards of a group to advantages. Pure Python: the server process imports it without torch.

The advantage of a trajectory is its reward minus the mean of its group (Dr.GRPO: no division by the standard deviation,
which would make nearly even groups as loud as decided ones; `scale_rewards="group"` divides as the first GRPO did). A
group in which all rewards are the same says nothing about what was better and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from art.config import TrainConfig
from art.errors import TrajectoryError

_STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Example: rewards 1, 0, 0, 1 give values 0.5, -0.5, -0.5, 0.5; rewards 1, 1, 1 give zeros and no spread."""

    values: list[float]  # one per trajectory; zeros in a group without spread
    has_spread: bool
    """False: the group carries no signal; do not train it, but count it."""


def group_advantages(rewards: Sequence[float], config: TrainConfig, *, names: Sequence[str]) -> GroupAdvantages:
    """Advantages of one group; `names` are those of its trajectories, for the error.

    Raises:
        TrajectoryError: a reward is not a finite number.
    """
    for name, reward in zip(names, rewards, strict=True):
        if not math.isfinite(reward):
            raise TrajectoryError(
                f"{name} has reward {reward}, which is not a finite number; give it a real reward, or leave the "
                "trajectory out"
            )
    count = len(rewards)
    if count == 0 or min(rewards) == max(rewards):  # equal rewards, whatever rounding makes of their mean
        return GroupAdvantages([0.0] * count, has_spread=False)
    mean = math.fsum(reward / count for reward in rewards)
    centred = [reward - mean for reward in rewards]
    if max(map(abs, centred)) <= config.spread_tolerance:
        return GroupAdvantages([0.0] * count, has_spread=False)
    if config.scale_rewards == "group":
        std = math.hypot(*centred) / math.sqrt(count)
        centred = [value / (std + _STD_EPSILON) for value in centred]
    return GroupAdvantages(centred, has_spread=True)
