"""What the trainings say together: gains and steps over seeds, by where rewards came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from art.metrics.scores import Estimate, estimate
from benchmarks.judging.plan import HAND
from benchmarks.judging.results import Arm, JudgedTask, Training

LEVEL = 0.5
"""Share of the gain with rewards by hand up to which steps are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one arm has reached, beside rewards by hand of the same seeds."""

    arm: Arm
    seeds: int
    before: Estimate
    after: Estimate
    gain: Estimate
    against_hand: Estimate | None
    """Difference of the gain from that of rewards by hand, seed by seed."""
    steps: Estimate | None
    """Steps to the level; `None` if a seed did not reach it."""
    more_steps: Estimate | None
    """Steps to the level over those with rewards by hand, seed by seed; `None` if a seed of either did not reach it."""
    reached: int
    """Seeds that reached the level."""
    measured: Estimate | None
    """Reliability of one pass before training, as measured."""
    measured_after: Estimate | None
    """Reliability of one pass on groups of the trained models."""
    pairs: Estimate | None
    """Share of pairs in the right order before training."""


def has_arms(judged: JudgedTask, arms: Sequence[Arm]) -> bool:
    return all(judged.of(arm) for arm in arms)


def level_of(by_hand: Training) -> float:
    """Return the level to which steps are counted on a seed: `LEVEL` of the way that rewards by hand went."""
    return by_hand.curve[0].mean + LEVEL * by_hand.gain


def costs_of(judged: JudgedTask, arms: Iterable[Arm]) -> list[Cost]:
    """Return what each arm has reached; nothing without trainings with rewards by hand to compare with."""
    return [_cost(judged, arm) for arm in arms if judged.of(arm)] if judged.of(HAND) else []


def _cost(judged: JudgedTask, arm: Arm) -> Cost:
    trainings = judged.of(arm)
    by_hand = {one.seed: one for one in judged.of(HAND)}
    pairs = [(one, by_hand[one.seed]) for one in trainings if one.seed in by_hand]
    steps = [one.steps_to(level_of(other)) for one, other in pairs]
    ratios = [_ratio(one, other) for one, other in pairs]
    return Cost(
        arm=arm, seeds=len(trainings),
        before=estimate([one.curve[0].mean for one in trainings]),
        after=estimate([one.curve[-1].mean for one in trainings]),
        gain=estimate([one.gain for one in trainings]),
        against_hand=estimate([one.gain - other.gain for one, other in pairs]) if pairs and arm != HAND else None,
        steps=_all(steps), more_steps=_all(ratios) if arm != HAND else None,
        reached=sum(step is not None for step in steps),
        measured=_all([one.before and one.before.reliability for one in trainings]),
        measured_after=_some([one.after.reliability for one in trainings if one.after is not None]),
        pairs=_all([one.before and one.before.pairwise_accuracy for one in trainings]),
    )  # fmt: skip


def _ratio(one: Training, by_hand: Training) -> float | None:
    level = level_of(by_hand)
    mine, theirs = one.steps_to(level), by_hand.steps_to(level)
    return mine / theirs if mine is not None and theirs else None


def _all(values: Sequence[float | None]) -> Estimate | None:
    """Estimate the mean of the values if all are known."""
    known = [value for value in values if value is not None]
    return estimate(known) if known and len(known) == len(values) else None


def _some(values: Sequence[float]) -> Estimate | None:
    return estimate(values) if values else None
