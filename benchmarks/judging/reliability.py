"""A scripted judge of a given reliability.

Reliability is what `art judge check` calls the reliability of one pass, and what training with one pass has: the share
of the spread of scores within a group that a second pass in the reverse order gives again
(`art.rewards.ruler`).
It belongs to a judge and to the rollouts that it sees: the same noise hides more of smaller differences.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from art.rewards import Ruler
from art.rewards.ruler import compare_passes
from art.testing.judge import ScriptedJudge
from art.trajectory import TrajectoryGroup
from art_recipes.judge_check import check_judge
from benchmarks.judging.results import Measured

BIAS_PER_NOISE = 1.0
"""Bonus of the first place over the standard deviation of a score's error: the judge is as biased as noisy."""
DRAWS = 200
"""Simulated checks of each group."""
LARGEST_NOISE = 2.0


def find_noise(judge: ScriptedJudge, true_scores: Sequence[Sequence[float]], reliability: float) -> float:
    """Return the noise with which the judge has this reliability on groups with these true scores, by bisection.

    Raises:
        ValueError: no noise gives that reliability.
    """
    low, high = 0.0, LARGEST_NOISE
    if simulate(judge, true_scores, high) > reliability:
        raise ValueError(f"even with noise {high} the judge is more reliable than {reliability}")
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if simulate(judge, true_scores, middle) > reliability else (low, middle)
    return (low + high) / 2


def simulate(judge: ScriptedJudge, true_scores: Sequence[Sequence[float]], noise: float) -> float:
    """Return the mean reliability of one pass over `DRAWS` checks of each group. Sets the judge's noise and bias."""
    rng = random.Random(0)
    set_noise(judge, noise)

    def passes(scores: list[float]) -> float:
        count = len(scores)
        rng.shuffle(scores)
        first = [judge.misjudge(true, place, count, rng) for place, true in enumerate(scores)]
        second = [judge.misjudge(true, count - 1 - place, count, rng) for place, true in enumerate(scores)]
        return compare_passes(first, second).single_reliability

    return statistics.fmean(passes(list(scores)) for scores in true_scores for _ in range(DRAWS))


def set_noise(judge: ScriptedJudge, noise: float) -> None:
    judge.noise, judge.position_bias = noise, noise * BIAS_PER_NOISE


async def measure(ruler: Ruler, groups: Sequence[TrajectoryGroup]) -> Measured | None:
    """Measure a judge as `art judge check` does, with the rewards as labels; `None` if no group can be judged.

    Raises:
        RuntimeError: a group got no scores.
    """
    report = await check_judge(ruler, groups, label=lambda group: [trajectory.reward for trajectory in group])
    if report.faults:
        raise RuntimeError(f"{len(report.faults)} groups got no scores; the first: {report.faults[0]}")
    if not report.num_groups:
        return None
    return Measured(
        reliability=report.order_reliability, two_pass_reliability=report.two_pass_reliability,
        pairwise_accuracy=report.pairwise_accuracy, order_bias=report.order_bias, spread=report.spread,
        groups=report.num_groups,
    )  # fmt: skip
