"""The interface of rewards: a `Judge` gives each trajectory of a group a score.

    Ruler("openai/o3")                      compares the trajectories of a group                     (ruler.py)
    AbsoluteJudge("openai/o3", ...)         grades one trajectory at a time, e.g. by a right answer  (absolute.py)
    combine({"quality": judge, ...})        a weighted sum of judges and plain functions             (combine.py)
    lambda trajectory: ...                  a plain function, async or not

`score_group` applies any of them to a group. `GroupScorer` does so in a gather, where a failing judge does not end the
run (outcomes.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from art.trajectory import MetricValue, Trajectory, TrajectoryGroup

RewardFunction = Callable[[Trajectory], float | Awaitable[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judge's score for one trajectory."""

    score: float
    """The new reward. Language models give 0 to 1."""
    explanation: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """Scores that make up `score`, by name: criteria of a rubric, or judges of a weighted sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A judge's scores for the trajectories of a group, with costs and metrics of the judging."""

    verdicts: list[Verdict]
    """One verdict per trajectory, in the order of the group."""
    costs_usd: dict[str, float] = field(default_factory=dict)
    """Cost in USD by judge, without judges whose price is not known."""
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    """Metrics of the judging itself: disagreement, tokens, repairs."""


@runtime_checkable
class Judge(Protocol):
    """The interface of judges, which score the trajectories of a group. One instance can score many groups at once."""

    name: str
    """Name in metrics: the score is logged as `<name>_score`, and the cost as `costs/judge/<name>`."""

    async def judge(self, group: TrajectoryGroup) -> Judgement:
        """Score every trajectory of a group.

        Raises:
            JudgeError: there are no usable scores. A judge never makes a score up.
        """
        ...
