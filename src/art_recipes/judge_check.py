"""Measures the noise, the order bias and the accuracy of a judge.

Each group is judged twice per repeat, in one order and in its reverse. What moves with a trajectory's place comes from
the order; the rest of the difference is the judge's noise.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from art.errors import ContextLengthError, JudgeError
from art.rewards.evidence import evidence_of
from art.rewards.grader import total_cost
from art.rewards.judge import Judgement
from art.rewards.ruler import Ruler, compare_passes
from art.trajectory import TrajectoryGroup

Z_95 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTrial:
    """The scores of one group that was judged twice: in one order, and in the reverse order."""

    labels: list[float] | None
    first: list[float]
    reversed: list[float]
    positions: list[float]
    """Position of each trajectory in the first order, from 1 (shown first) to -1 (shown last)."""
    judgements: list[Judgement]
    """The two judgements, with their time and cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReport:
    """The result of `check_judge`: a judge's noise, order bias, accuracy, time and cost. NaN if not measurable."""

    num_groups: int
    num_trajectories: int
    num_questions: int
    faults: list[str] = field(default_factory=list)
    """The reasons why groups got no scores."""
    num_refused: int = 0
    """Number of answers that could not be used, so that the judge was asked again."""
    spread: float = math.nan
    """Mean standard deviation of the scores within a group: the signal for training."""
    order_bias: float = math.nan
    """How much higher a trajectory scores when shown first than when shown last. Negative if the last one gains."""
    order_bias_interval: tuple[float, float] = (math.nan, math.nan)
    """95 % confidence interval of `order_bias`."""
    order_reliability: float = math.nan
    """Reliability of one pass, measured by reversing the order. Training with `passes=1` has this reliability."""
    two_pass_reliability: float = math.nan
    """Reliability of the mean of both orders (`passes=2`)."""
    pairwise_accuracy: float = math.nan
    """Share of pairs with different labels that one pass orders correctly. 0.5 is chance."""
    two_pass_accuracy: float = math.nan
    """Share of pairs with different labels that the mean of both orders puts in the right order."""
    cost_usd: float | None = None
    """Cost of the whole check; `None` if the price is not known."""
    seconds_median: float = math.nan
    """Median time of a question, without waits for a free slot or after an overload."""
    seconds_max: float = math.nan
    """Longest time of a question."""


async def check_judge(
    judge: Ruler,
    groups: Sequence[TrajectoryGroup],
    *,
    label: Callable[[TrajectoryGroup], list[float] | None] = lambda group: None,
    repeats: int = 1,
    seed: int = 0,
    on_trial: Callable[[], None] = lambda: None,
) -> JudgeReport:
    """Measure a judge's noise, order bias and accuracy by asking it `2 * repeats` questions per group.

    Groups whose trajectories are all equal are left out.

    Args:
        label: returns the true scores of a group's trajectories on any scale, or `None` if they are not known.
        on_trial: called after each group and repeat.
    """
    rng = random.Random(seed)
    trials: list[JudgeTrial] = []
    faults: list[str] = []
    usable = [group for group in groups if len({evidence_of(item).digest for item in group}) > 1]

    async def measure(group: TrajectoryGroup, order_seed: int) -> None:
        try:
            trials.append(await _run_trial(judge, group, label(group), random.Random(order_seed)))
        except (JudgeError, ContextLengthError) as error:
            faults.append(str(error))
        on_trial()

    await asyncio.gather(*(measure(group, rng.getrandbits(32)) for group in usable for _ in range(repeats)))
    report = JudgeReport(
        num_groups=len(usable), num_trajectories=sum(map(len, usable)), num_questions=2 * len(trials), faults=faults
    )
    return _summarize(report, trials) if trials else report


async def _run_trial(
    judge: Ruler, group: TrajectoryGroup, labels: list[float] | None, rng: random.Random
) -> JudgeTrial:
    evidence = [evidence_of(trajectory) for trajectory in group]
    order = list(range(len(evidence)))
    rng.shuffle(order)
    place = [order.index(i) for i in range(len(order))]
    judgements = [await judge.grader.grade([evidence[i] for i in shown]) for shown in (order, order[::-1])]
    first, turned = ([verdict.score for verdict in judgement.verdicts] for judgement in judgements)
    return JudgeTrial(
        labels=labels,
        first=[first[i] for i in place],
        reversed=[turned[::-1][i] for i in place],
        positions=[1 - 2 * i / (len(order) - 1) for i in place],
        judgements=judgements,
    )


def _summarize(report: JudgeReport, trials: Sequence[JudgeTrial]) -> JudgeReport:
    turned = [compare_passes(trial.first, trial.reversed) for trial in trials]
    # Reversing the order moves a trajectory by twice its position, so half the difference of its scores belongs to it.
    moved = [
        (position, (a - b) / 2)
        for trial in trials
        for position, a, b in zip(trial.positions, trial.first, trial.reversed, strict=True)
    ]
    bias, error = slope(moved)
    labelled = [(trial, trial.labels) for trial in trials if trial.labels is not None]
    both = [[(a + b) / 2 for a, b in zip(trial.first, trial.reversed, strict=True)] for trial, _ in labelled]
    judgements = [judgement for trial in trials for judgement in trial.judgements]
    seconds = [float(judgement.metrics["judge_seconds"]) for judgement in judgements]
    return replace(
        report,
        num_refused=sum(int(judgement.metrics["judge_answers_refused"]) for judgement in judgements),
        spread=statistics.fmean(statistics.pstdev(trial.first) for trial in trials),
        order_bias=2 * bias,
        order_bias_interval=(2 * (bias - Z_95 * error), 2 * (bias + Z_95 * error)),
        order_reliability=statistics.fmean(item.single_reliability for item in turned),
        two_pass_reliability=statistics.fmean(item.reliability for item in turned),
        pairwise_accuracy=_accuracy([(trial.first, labels) for trial, labels in labelled]),
        two_pass_accuracy=_accuracy([(mean, labels) for mean, (_, labels) in zip(both, labelled, strict=True)]),
        cost_usd=total_cost(next(iter(judgement.costs_usd.values()), None) for judgement in judgements),
        seconds_median=statistics.median(seconds),
        seconds_max=max(seconds),
    )


def _accuracy(pairs: Sequence[tuple[list[float], list[float]]]) -> float:
    counted = [pairwise_accuracy(scores, labels) for scores, labels in pairs]
    total = sum(count for _, count in counted)
    return sum(right for right, _ in counted) / total if total else math.nan


def pairwise_accuracy(scores: Sequence[float], labels: Sequence[float]) -> tuple[float, int]:
    """Count the pairs whose labels differ, and those among them that the scores order correctly: `(right, pairs)`.

    A pair with equal scores counts as half right.
    Example: scores (0.2, 0.9, 0.9) with labels (0, 1, 2) have 2.5 of 3 pairs right.
    """
    right, pairs = 0.0, 0
    for (score, label), (other_score, other_label) in combinations(zip(scores, labels, strict=True), 2):
        if label == other_label:
            continue
        pairs += 1
        difference = (score - other_score) * (label - other_label)
        right += 0.5 if difference == 0 else float(difference > 0)
    return right, pairs


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least-squares slope through the origin of `(x, y)` points, and its standard error.

    Both are NaN if all x are 0. The error is also NaN for a single point.
    """
    spread = sum(x * x for x, _ in points)
    if spread == 0:
        return math.nan, math.nan
    value = sum(x * y for x, y in points) / spread
    if len(points) < 2:
        return value, math.nan
    residual = sum((y - value * x) ** 2 for x, y in points) / (len(points) - 1)
    return value, math.sqrt(residual / spread)
