"""Turn the rewards of a step into advantages. Pure Python: the server process imports it without torch.

    advantage of a trajectory   (reward - baseline) / scale
    advantage of a token        advantage of its trajectory
                                + the sum of (turn reward - mean) / scale over its own turn and all later ones
                                + the sum of (token reward - mean) / scale over itself and all later tokens

The baseline is the mean of the group, or of its other members (leave one out, "Back to basics", arXiv 2402.14740). The
scale is 1 by default (Dr.GRPO, arXiv 2503.20783: divided by its standard deviation, a group with nearly equal
rewards would weigh as much as one with clear differences); the standard deviation of the group (DeepSeekMath, arXiv
2402.03300) or of all rewards of the step ("Tricks or traps?", arXiv 2508.08221); or the group's mean, which for rewards
of 0 and 1 follows the gradient of the log of the success rate (maximum likelihood, arXiv 2602.02710). Turn and token
rewards are centred on the mean over all turns or tokens of the group, as in process supervision (DeepSeekMath, section
4.1.3).

A group has no spread if all its rewards of each kind are equal, within `SPREAD_TOLERANCE`: nothing shows which rollout
was better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from art.config.training import SPREAD_TOLERANCE, TrainConfig
from art.credit.resolve import ResolvedTrajectory
from art.errors import TrajectoryError

_STD_EPSILON = 1e-6
_MAX_REWARD = 1e30
"""Size up to which squares and sums of rewards are finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAdvantages:
    """The advantages of one rollout in parts, which add up at each token.

    Example: advantage 0.5, two choices with turn rewards 1 and 0 (mean 0.5), no token rewards
        trajectory  0.5
        turns       0.5 + (-0.5), -0.5        so the first choice's tokens have 0.5 and the second's 0.0
    """

    trajectory: float = 0.0
    turns: Sequence[float] = ()  # [C] added to every token of a choice
    tokens: Sequence[Sequence[float]] = ()  # [C][tokens of the choice] added to that token

    def of_choice(self, choice: int | None) -> list[float]:
        """Return one advantage per token of a choice, or a single one for all of them.

        Args:
            choice: index of the choice that turn and token rewards refer to; `None` for an answer without such rewards.
        """
        whole = self.trajectory + (self.turns[choice] if choice is not None and self.turns else 0.0)
        if choice is None or not self.tokens:
            return [whole]
        return [whole + value for value in self.tokens[choice]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """The advantages of a group's rollouts, in their order.

    Example: rewards 1, 0, 0, 1 give trajectories 0.5, -0.5, -0.5, 0.5; rewards 1, 1, 1 give zeros and no spread.
    """

    rollouts: list[RolloutAdvantages]
    has_spread: bool
    """Whether rewards differ within the group. Without that there is nothing to learn from it."""


def compute_advantages(groups: Sequence[Sequence[ResolvedTrajectory]], config: TrainConfig) -> list[GroupAdvantages]:
    """Compute the advantages of each group of a step.

    Raises:
        TrajectoryError: a reward is not a finite number, only some rollouts of a group have turn or token rewards, or
            maximum-likelihood scaling meets a reward other than 0 and 1.
    """
    for group in groups:
        check_finite(group)
        _check_complete(group)
        if config.scale_rewards == "mean":
            user = "scale_rewards='mean' (maximum likelihood)"
            for rollout in group:
                if rollout.reward not in (0.0, 1.0):
                    raise TrajectoryError(
                        f"{rollout.label} has reward {rollout.reward}; {user} takes rewards of 0 and 1 only. Use "
                        "another `scale_rewards`, or rewards that say failed or succeeded",
                        group=rollout.group,
                    )
            _refuse_parts(group, f"{user} judges")
    outcomes = _standardise([[[rollout.reward] for rollout in group] for group in groups], config)
    turns = _standardise([[rollout.turn_rewards for rollout in group] for group in groups], config)
    flat = [[list(itertools.chain(*rollout.token_rewards)) for rollout in group] for group in groups]
    tokens = _standardise(flat, config)
    by_group = []
    for group, *parts in zip(groups, outcomes, turns, tokens, strict=True):
        rollouts = []
        for rollout, outcome, turn_values, token_values in zip(group, *(values for values, _ in parts), strict=True):
            later = iter(_suffix_sums(token_values))
            own = [list(itertools.islice(later, len(rewards))) for rewards in rollout.token_rewards]
            rollouts.append(RolloutAdvantages(trajectory=outcome[0], turns=_suffix_sums(turn_values), tokens=own))
        by_group.append(GroupAdvantages(rollouts=rollouts, has_spread=any(has_spread for _, has_spread in parts)))
    return by_group


def preference_pair(group: Sequence[ResolvedTrajectory]) -> tuple[int, int] | None:
    """Return the indices (best, worst) of a group; `None` if their rewards differ by at most `SPREAD_TOLERANCE`.

    Among equal rewards the first rollout counts.

    Raises:
        TrajectoryError: a reward is not a finite number, or there are turn or token rewards.
    """
    check_finite(group)
    _refuse_parts(group, "a preference pair compares")
    rewards = [rollout.reward for rollout in group]
    if not rewards or max(rewards) - min(rewards) <= SPREAD_TOLERANCE:
        return None
    return rewards.index(max(rewards)), rewards.index(min(rewards))


# -- baseline and scale --


def _standardise(
    groups: Sequence[Sequence[Sequence[float]]], config: TrainConfig
) -> list[tuple[list[list[float]], bool]]:
    """Subtract the baseline from one kind of reward and divide by the scale.

    Returns:
        For each group the values of each rollout, zeros without spread, and whether the group has spread.
    """
    batch_std = _std([value for group in groups for values in group for value in values])
    return [_standardise_group(group, config, batch_std) for group in groups]


def _standardise_group(
    group: Sequence[Sequence[float]], config: TrainConfig, batch_std: float
) -> tuple[list[list[float]], bool]:
    everything = [value for values in group for value in values]
    mean = _mean(everything)
    centred = [[value - mean for value in values] for values in group]
    largest = max((abs(value) for values in centred for value in values), default=0.0)
    leave_out = config.baseline == "leave_one_out"
    alone = leave_out and any(len(values) == len(everything) for values in group)
    # `min == max` catches equal rewards whose mean is rounded.
    if alone or not everything or min(everything) == max(everything) or largest <= SPREAD_TOLERANCE:
        return [[0.0] * len(values) for values in group], False
    if leave_out:  # `centred` sums to 0 over the group, so the sum of the others is minus that of a rollout's own
        others = [-math.fsum(values) / (len(everything) - len(values)) for values in centred]
        centred = [[value - other for value in values] for values, other in zip(centred, others, strict=True)]
    match config.scale_rewards:
        case "none":
            return centred, True
        case "group":
            scale = _std(everything) + _STD_EPSILON
        case "batch":
            scale = batch_std + _STD_EPSILON
        case "mean":
            scale = mean
    return [[value / scale for value in values] for values in centred], True


# -- errors --


def check_finite(group: Sequence[ResolvedTrajectory]) -> None:
    """Refuse rewards that are no numbers, or whose squares and sums would not be, with a `TrajectoryError`."""
    for rollout in group:
        for value in itertools.chain([rollout.reward], rollout.turn_rewards, *rollout.token_rewards):
            if not abs(value) <= _MAX_REWARD:
                fault = f"is above {_MAX_REWARD:g} in size" if math.isfinite(value) else "is not a finite number"
                raise TrajectoryError(
                    f"{rollout.label} has reward {value}, which {fault}; give it a reward near 1, or leave the "
                    "trajectory out",
                    group=rollout.group,
                )


def _check_complete(group: Sequence[ResolvedTrajectory]) -> None:
    """Refuse a group in which only some rollouts have turn or token rewards: they are compared within the group."""
    for kind in ("turn_rewards", "token_rewards"):
        with_them = [rollout for rollout in group if getattr(rollout, kind)]
        without = [rollout for rollout in group if rollout.num_choices > 0 and not getattr(rollout, kind)]
        if with_them and without:
            raise TrajectoryError(
                f"{without[0].label} has no {kind}, but {with_them[0].label} of the same group has; give them to all "
                "trajectories of a group or to none",
                group=without[0].group,
            )


def _refuse_parts(group: Sequence[ResolvedTrajectory], user: str) -> None:
    for rollout in group:
        if rollout.turn_rewards or rollout.token_rewards:
            raise TrajectoryError(
                f"{rollout.label} has turn or token rewards, but {user} whole rollouts. Leave them out, or choose "
                "another objective or scale",
                group=rollout.group,
            )


# -- numbers --


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values)


def _std(values: Sequence[float]) -> float:
    """Population standard deviation; 0 for no values."""
    mean = _mean(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(max(len(values), 1))


def _suffix_sums(values: Sequence[float]) -> list[float]:
    """Turn [a, b, c] into [a + b + c, b + c, c]."""
    return list(itertools.accumulate(reversed(values)))[::-1]
