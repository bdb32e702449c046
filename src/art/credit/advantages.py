"""From the rewards of a step to advantages. Pure Python: the server process imports it without torch.

    shaped rewards   R  =  reward - overlong punishment - length penalty
    advantage of a trajectory   (R - baseline) / scale
    advantage of a token        that of its trajectory
                                + the sum of (turn reward - mean) / scale over its own turn and those behind it
                                + the sum of (token reward - mean) / scale over itself and the tokens behind it

The baseline is the mean of the group, or that of its other members (leave one out, "Back to basics", arXiv 2402.14740).
The scale is 1 by default (Dr.GRPO, arXiv 2503.20783: a standard deviation would make nearly even groups as loud as
decided ones); the standard deviation of the group (DeepSeekMath, arXiv 2402.03300) or of all rewards of the step
("Tricks or traps?", arXiv 2508.08221); or the group's mean, which for rewards of 0 and 1 follows the gradient of the
log of the success rate (maximum likelihood, arXiv 2602.02710). Turn and token rewards are centred on the mean over all
turns or tokens of the group, as in process supervision (DeepSeekMath, section 4.1.3).

A group in which all rewards of each kind are the same says nothing about what was better: it has no spread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from art.config import LengthPenaltyConfig, OverlongConfig, TrainConfig
from art.errors import TrajectoryError

_STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRewards:
    """The rewards of one rollout, and the counts that may shape them."""

    name: str
    """For errors."""
    reward: float
    turn_rewards: Sequence[float] = ()
    """One per choice, or empty."""
    token_rewards: Sequence[Sequence[float]] = ()
    """For each choice, one per sampled token; or empty."""
    choices: int = 0
    """Of the conversation that turn and token rewards are about."""
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    """Tokens that the model read and did not sample."""
    turns: int = 0
    """Answers that the model sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAdvantages:
    """Example: advantage 0.5, two choices with turn rewards 1 and 0 (mean 0.5), no token rewards

    trajectory  0.5
    turns       0.5 + (-0.5), -0.5        so the first choice's tokens have 0.5 and the second's 0.0
    """

    trajectory: float = 0.0
    turns: Sequence[float] = ()  # [C] added to every token of a choice
    tokens: Sequence[Sequence[float]] = ()  # [C][tokens of the choice] added to that token

    def of_tokens(self, choice: int | None, num_tokens: int) -> list[float]:
        """Advantages of the tokens of a choice; `None`: of one that has no turn or token rewards."""
        whole = self.trajectory + (self.turns[choice] if choice is not None and self.turns else 0.0)
        if choice is None or not self.tokens:
            return [whole] * num_tokens
        return [whole + value for value in self.tokens[choice]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """Example: rewards 1, 0, 0, 1 give trajectories 0.5, -0.5, -0.5, 0.5; rewards 1, 1, 1 give zeros and no spread."""

    rollouts: list[RolloutAdvantages]  # as many as the group has
    has_spread: bool
    """False: the group carries no signal."""


def compute_advantages(groups: Sequence[Sequence[RolloutRewards]], config: TrainConfig) -> list[GroupAdvantages]:
    """Advantages of each group of a step.

    Raises:
        TrajectoryError: a reward is not a finite number, only some rollouts of a group have turn or token rewards, or
            maximum-likelihood scaling meets a reward other than 0 and 1.
    """
    for group in groups:
        _check_finite(group)
        _check_complete(group)
        if config.scale_rewards == "mean":
            _check_binary(group)
    shaped = [_shape_rewards(group, config) for group in groups]
    outcomes = _standardise([[[value] for value in rewards] for rewards in shaped], config)
    turns = _standardise([[rollout.turn_rewards for rollout in group] for group in groups], config)
    flat = [[list(itertools.chain(*rollout.token_rewards)) for rollout in group] for group in groups]
    tokens = _standardise(flat, config)
    found = []
    for group, *parts in zip(groups, outcomes, turns, tokens, strict=True):
        rollouts = [
            RolloutAdvantages(
                trajectory=outcome[0],
                turns=_sums_from_there(of_turns),
                tokens=_cut_like(_sums_from_there(of_tokens), rollout.token_rewards),
            )
            for rollout, outcome, of_turns, of_tokens in zip(group, *(part.values for part in parts), strict=True)
        ]
        found.append(GroupAdvantages(rollouts=rollouts, has_spread=any(part.has_spread for part in parts)))
    return found


def preference_pairs(
    group: Sequence[RolloutRewards], config: TrainConfig, *, kind: Literal["best_worst", "all"]
) -> list[tuple[int, int]]:
    """(chosen, rejected) indices whose shaped rewards differ by more than `spread_tolerance`, best first.

    `all` gives all such pairs, `best_worst` at most one. Of equal rewards the first counts.

    Raises:
        TrajectoryError: a reward is not a finite number, or there are turn or token rewards.
    """
    _check_finite(group)
    _refuse_parts(group, "a preference compares")
    rewards = _shape_rewards(group, config)
    order = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    if kind == "best_worst" and rewards:
        order = [order[0], min(order, key=rewards.__getitem__)]
    pairs = itertools.combinations(order, 2)
    return [(a, b) for a, b in pairs if rewards[a] - rewards[b] > config.spread_tolerance]


# -- shaping --


def _shape_rewards(group: Sequence[RolloutRewards], config: TrainConfig) -> list[float]:
    rewards = [rollout.reward for rollout in group]
    if config.overlong is not None:
        rewards = [
            reward - overlong_punishment(rollout.sampled_tokens, config.overlong)
            for reward, rollout in zip(rewards, group, strict=True)
        ]
    if config.length_penalty is not None:
        penalties = _length_penalties(group, config.length_penalty)
        rewards = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
    return rewards


def overlong_punishment(sampled_tokens: int, config: OverlongConfig) -> float:
    """From 0 to 1: 0 up to `max_tokens - buffer` sampled tokens, 1 from `max_tokens` on, linear between.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    excess = sampled_tokens - (config.max_tokens - config.buffer)
    return min(max(excess / config.buffer, 0.0), 1.0)


def _length_penalties(group: Sequence[RolloutRewards], config: LengthPenaltyConfig) -> list[float]:
    """What is taken off each reward: the group's mean reward times the weighted relative lengths.

    A group in which nothing passes (mean reward 0 or below) is not asked to be brief.
    """
    rate = max(_mean([rollout.reward for rollout in group]), 0.0)
    kinds = (
        (config.sampled_tokens, [rollout.sampled_tokens for rollout in group]),
        (config.prompt_tokens, [rollout.prompt_tokens for rollout in group]),
        (config.turns, [rollout.turns for rollout in group]),
    )
    return [rate * sum(weight * counts[i] / max(*counts, 1) for weight, counts in kinds) for i, _ in enumerate(group)]


# -- baseline and scale --


@dataclass(frozen=True, slots=True)
class _Standardised:
    values: list[list[float]]  # per rollout; zeros without spread
    has_spread: bool


def _standardise(groups: Sequence[Sequence[Sequence[float]]], config: TrainConfig) -> list[_Standardised]:
    """One kind of reward, by group and rollout: less its baseline, over its scale."""
    batch = [value for group in groups for values in group for value in values]
    batch_std = _std(batch) if config.scale_rewards == "batch" else 1.0
    return [_standardise_group(group, config, batch_std) for group in groups]


def _standardise_group(group: Sequence[Sequence[float]], config: TrainConfig, batch_std: float) -> _Standardised:
    everything = [value for values in group for value in values]
    mean = _mean(everything)
    centred = [[value - mean for value in values] for values in group]
    largest = max((abs(value) for values in centred for value in values), default=0.0)
    leave_out = config.baseline == "leave_one_out"
    alone = leave_out and any(len(values) == len(everything) for values in group)
    # Equal rewards are equal, whatever rounding makes of their mean.
    if alone or not everything or min(everything) == max(everything) or largest <= config.spread_tolerance:
        return _Standardised([[0.0] * len(values) for values in group], has_spread=False)
    if leave_out:
        centred = [_leave_out(values, len(everything) - len(values)) for values in centred]
    match config.scale_rewards:
        case "none":
            return _Standardised(centred, has_spread=True)
        case "group":
            scale = _std(everything) + _STD_EPSILON
        case "batch":
            scale = batch_std + _STD_EPSILON
        case "mean":
            scale = mean
    return _Standardised([[value / scale for value in values] for values in centred], has_spread=True)


def _leave_out(centred: list[float], num_others: int) -> list[float]:
    """`centred` sums to 0 over the group, so what the others sum to is minus the sum of these."""
    baseline = -math.fsum(centred) / num_others
    return [value - baseline for value in centred]


# -- errors --


def _check_finite(group: Sequence[RolloutRewards]) -> None:
    for rollout in group:
        for value in itertools.chain([rollout.reward], rollout.turn_rewards, *rollout.token_rewards):
            if not math.isfinite(value):
                raise TrajectoryError(
                    f"{rollout.name} has reward {value}, which is not a finite number; give it a real reward, or leave "
                    "the trajectory out"
                )


def _check_complete(group: Sequence[RolloutRewards]) -> None:
    """Turn and token rewards are compared within the group, so all of its rollouts have them or none."""
    for kind in ("turn_rewards", "token_rewards"):
        with_them = [rollout for rollout in group if getattr(rollout, kind)]
        without = [rollout for rollout in group if rollout.choices > 0 and not getattr(rollout, kind)]
        if with_them and without:
            raise TrajectoryError(
                f"{without[0].name} has no {kind}, and {with_them[0].name} of its group has; give them to all "
                "trajectories of a group or to none"
            )


def _check_binary(group: Sequence[RolloutRewards]) -> None:
    """Maximum likelihood is defined for rollouts that fail or succeed as a whole."""
    for rollout in group:
        if rollout.reward not in (0.0, 1.0):
            raise TrajectoryError(
                f"{rollout.name} has reward {rollout.reward}; scale_rewards='mean' (maximum likelihood) takes rewards "
                "of 0 and 1 only. Use another `scale_rewards`, or rewards that say failed or succeeded"
            )
    _refuse_parts(group, "scale_rewards='mean' (maximum likelihood) judges")


def _refuse_parts(group: Sequence[RolloutRewards], who: str) -> None:
    for rollout in group:
        if rollout.turn_rewards or rollout.token_rewards:
            raise TrajectoryError(
                f"{rollout.name} has turn or token rewards, but {who} whole rollouts. Leave them out, or choose "
                "another objective or scale"
            )


# -- numbers --


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values)


def _std(values: Sequence[float]) -> float:
    """Population standard deviation; 0 of nothing."""
    mean = _mean(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(max(len(values), 1))


def _sums_from_there(values: Sequence[float]) -> list[float]:
    """[a, b, c] to [a + b + c, b + c, c]."""
    return list(itertools.accumulate(reversed(values)))[::-1]


def _cut_like(values: Sequence[float], pattern: Sequence[Sequence[float]]) -> list[list[float]]:
    """`values` in parts as long as those of `pattern`."""
    rest = iter(values)
    return [list(itertools.islice(rest, len(part))) for part in pattern]
