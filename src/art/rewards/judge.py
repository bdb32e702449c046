"""The seam of rewards: whatever looks at a group and gives each of its trajectories a score is a `Judge`.

    Ruler("openai/o3")                      compares the trajectories of a group            (ruler.py)
    AbsoluteJudge("openai/o3", ...)         looks at one trajectory at a time, with or without a reference (absolute.py)
    combine({"quality": judge, ...})        a weighted sum of judges and of plain functions (combine.py)
    lambda trajectory: ...                  a plain function, async or not

`score_group` applies any of them to a group; `GroupScorer` does so in a gather, where a failing judge must not end the
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
    """What a judge says about one trajectory."""

    score: float
    """Becomes the reward. Judges that are language models give 0 to 1."""
    explanation: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """What the score is made of, by name: the criteria of a rubric, the members of a weighted sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a judge says about a group."""

    verdicts: list[Verdict]
    """One per trajectory, in the order of the group."""
    costs_usd: dict[str, float] = field(default_factory=dict)
    """By the name of who was paid; without those whose price is not known."""
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    """Of the judging itself: disagreement, tokens, repairs."""


@runtime_checkable
class Judge(Protocol):
    """Scores groups. One instance serves many groups at once."""

    name: str
    """Names the score among the metrics of a trajectory: `<name>_score`, and its cost: `costs/judge/<name>`."""

    async def judge(self, group: TrajectoryGroup) -> Judgement:
        """One verdict per trajectory.

        Raises:
            JudgeError: there are no usable scores; says why. Never a made-up score.
        """
        ...
