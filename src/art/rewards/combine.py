"""Makes judges from plain functions, and from weighted sums of judges and functions.

reward = combine(
    {"quality": Ruler("openai/o3"), "short": lambda t: 1 / len(t.messages_and_choices)},
    weights={"quality": 1.0, "short": 0.2},
)
group = await score_group(group, reward)
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from art.errors import ArtError, ConfigError, JudgeError
from art.rewards.asking.grader import run_together
from art.rewards.judge import Judge, Judgement, RewardFunction, Verdict
from art.trajectory import MetricValue, Trajectory, TrajectoryGroup


class FunctionJudge:
    """A judge whose score of a trajectory is the result of a function, async or not."""

    def __init__(self, function: RewardFunction, name: str | None = None) -> None:
        label = name or str(getattr(function, "__name__", ""))
        self.name: str = label if label.isidentifier() else "function"  # the name of a lambda is `<lambda>`
        self._function = function

    async def judge(self, group: TrajectoryGroup) -> Judgement:
        return Judgement(verdicts=await run_together(self._verdict(trajectory) for trajectory in group))

    async def _verdict(self, trajectory: Trajectory) -> Verdict:
        try:
            value = self._function(trajectory)
            return Verdict(score=float(await value if inspect.isawaitable(value) else value))
        except ArtError:
            raise
        except Exception as error:
            raise JudgeError(f"reward function {self.name!r} failed: {type(error).__name__}: {error}") from error


def as_judge(judge: Judge | RewardFunction) -> Judge:
    """Return a judge unchanged, and a function of a trajectory as a judge.

    Raises:
        ConfigError: the argument is neither.
    """
    if isinstance(judge, Judge):
        return judge
    if callable(judge):
        return FunctionJudge(judge)
    raise ConfigError(f"expected a judge or a function of a trajectory, got {type(judge).__name__}")


class WeightedSum:
    """A judge whose score is the weighted sum of other judges' scores."""

    def __init__(self, judges: Mapping[str, Judge], weights: Mapping[str, float], name: str) -> None:
        self.name = name
        self._judges, self._weights = dict(judges), dict(weights)

    async def judge(self, group: TrajectoryGroup) -> Judgement:
        """Score each trajectory by the weighted sum of all judges' scores.

        Raises:
            JudgeError: one of the judges gave no scores. The sum of the others would be another reward.
        """
        judgements = await run_together(judge.judge(group) for judge in self._judges.values())
        by_name = dict(zip(self._judges, judgements, strict=True))
        costs: dict[str, float] = {}
        metrics: dict[str, MetricValue] = {}
        for name, judgement in by_name.items():
            for source, usd in judgement.costs_usd.items():
                costs[source] = costs.get(source, 0.0) + usd
            metrics |= {f"{name}/{key}": value for key, value in judgement.metrics.items()}
        verdicts = [self._sum({name: j.verdicts[i] for name, j in by_name.items()}) for i in range(len(group))]
        return Judgement(verdicts=verdicts, costs_usd=costs, metrics=metrics)

    def _sum(self, verdicts: Mapping[str, Verdict]) -> Verdict:
        parts = {name: verdict.score for name, verdict in verdicts.items()}
        parts |= {f"{name}/{key}": value for name, verdict in verdicts.items() for key, value in verdict.parts.items()}
        explanations = [f"{name}: {verdict.explanation}" for name, verdict in verdicts.items() if verdict.explanation]
        return Verdict(
            score=sum(self._weights[name] * verdict.score for name, verdict in verdicts.items()),
            explanation="; ".join(explanations),
            parts=parts,
        )


def combine(
    judges: Mapping[str, Judge | RewardFunction],
    weights: Mapping[str, float] | None = None,
    *,
    name: str = "combined",
) -> WeightedSum:
    """Make a judge whose score is a weighted sum of the scores of judges and functions.

    Args:
        judges: judges and functions by name. Their scores are logged as `metrics["<name>/<judge>"]`.
        weights: the weight of each; 1 by default.
        name: name of the sum in metrics.

    Raises:
        ConfigError: there is no judge, or the names of judges and weights differ.
    """
    if not judges:
        raise ConfigError("`combine` needs at least one judge or function")
    weights = dict.fromkeys(judges, 1.0) if weights is None else weights
    if set(weights) != set(judges):
        raise ConfigError(f"the judges are {sorted(judges)}, but the weights are for {sorted(weights)}; give each one")
    return WeightedSum({key: as_judge(judge) for key, judge in judges.items()}, weights, name)
