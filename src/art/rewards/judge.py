"""The interface of rewards: a `Judge` gives each trajectory of a group a score.

    Ruler("openai/o3")                      compares the trajectories of a group                     (ruler.py)
    AbsoluteJudge("openai/o3", ...)         grades one trajectory at a time, e.g. by a right answer  (ruler.py)
    combine({"quality": judge, ...})        a weighted sum of judges and plain functions             (outcomes.py)
    lambda trajectory: ...                  a plain function, async or not

`score_group` applies any of them to a group. `GroupScorer` does so in a gather, where a failing judge does not end the
run (outcomes.py). `JudgeSettings` has the settings of judges that are language models.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from art.costs import Ledger
from art.errors import ConfigError
from art.trajectory import MetricValue, Trajectory, TrajectoryGroup

RewardFunction = Callable[[Trajectory], float | Awaitable[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judge's score for one trajectory."""

    score: float
    """The new reward. Language models give 0 to 1."""
    explanation: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """Scores that make up `score`, by name: judges of a weighted sum, or passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A judge's scores for the trajectories of a group, with costs and metrics of the judging."""

    verdicts: list[Verdict]
    """One verdict per trajectory, in the order of the group."""
    costs_usd: dict[str, float] = field(default_factory=dict)
    """Cost in USD by judge, without judges whose price is not known."""
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    """Metrics of the judging itself: disagreement and reliability."""


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


def params_at(base_url: str | None) -> dict[str, str]:
    """Parameters that send a judge's requests to an address, with the key in `OPENAI_API_KEY` if it is set."""
    return {} if base_url is None else {"base_url": base_url, "api_key": os.environ.get("OPENAI_API_KEY", "none")}


Budget = Ledger
"""A limit of costs, kept in memory. Judges with the same one in their settings share it. (`model.costs` is on disk.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """How a judge model is called, how its answers are checked, and what it may cost."""

    timeout_s: float = 120.0
    """Time limit of one request, in seconds."""
    deadline_s: float = 600.0
    """Time limit for judging one group, in seconds, with all requests and waits."""
    max_attempts: int = 5
    """Largest number of attempts per answer while the judge is overloaded, down or slow."""
    first_wait_s: float = 0.5
    """Seconds to wait before the second attempt. The wait doubles with each further attempt."""
    max_answers: int = 3
    """Largest number of answers to ask for when they cannot be used. The judge is told each time what was wrong."""
    max_concurrent: int = 16
    """Largest number of concurrent requests to one judge model at one address, over all groups of an event loop."""
    budget: Ledger | None = None
    """Ledger in which the cost of each answer is booked. Once its limit is spent, requests raise a `BudgetError`."""
    prompt_usd_per_million: float | None = None
    """Price of a million prompt tokens in US dollars. Replaces litellm's price; set both prices or none."""
    completion_usd_per_million: float | None = None
    """Price of a million completion tokens in US dollars."""
    seed: int | None = None
    """Seed of the order and the ids of trajectories in a question. By default they are random each time."""
    passes: Literal[1, 2] = 1
    """With 2, each group is judged a second time in reversed order. The scores are the mean of both, and
    `judge_disagreement` and `judge_reliability` say how far they differ."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "deadline_s", "max_attempts", "first_wait_s", "max_answers", "max_concurrent"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"JudgeSettings.{name} must be above 0, got {getattr(self, name)!r}")
        if self.passes not in (1, 2):
            raise ConfigError(f"JudgeSettings.passes must be 1 or 2, got {self.passes!r}")
        if (self.prompt_usd_per_million is None) != (self.completion_usd_per_million is None):
            raise ConfigError("give both `prompt_usd_per_million` and `completion_usd_per_million`, or neither")
