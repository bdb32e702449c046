"""Makes judges of functions and of weighted sums, applies judges to groups, and handles groups whose judge fails.

    reward = combine({"quality": Ruler("openai/o3"), "short": lambda t: 1 / len(t.messages_and_choices)})
    group = await score_group(group, reward)

A group is judged as a whole or not at all. Without a judgement its outcome is `infra_fault`, and no reward is made up:
a reward of 0 would teach the policy that everything in the group was bad.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping
from typing import Literal

from art.errors import ArtError, ConfigError, JudgeError
from art.faults import FaultWatch
from art.rewards.grader import run_together
from art.rewards.judge import Judge, Judgement, RewardFunction, Verdict
from art.trajectory import MetricValue, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)


class FunctionJudge:
    """A judge whose score of a trajectory is the result of a function, async or not."""

    def __init__(self, function: RewardFunction, name: str | None = None) -> None:
        label = name or str(getattr(function, "__name__", ""))
        self.name: str = label if label.isidentifier() else "function"  # the name of a lambda is `<lambda>`
        self._function = function

    async def judge(self, group: TrajectoryGroup) -> Judgement:
        async def verdict(trajectory: Trajectory) -> Verdict:
            try:
                value = self._function(trajectory)
                return Verdict(score=float(await value if inspect.isawaitable(value) else value))
            except ArtError:
                raise
            except Exception as error:
                raise JudgeError(f"reward function {self.name!r} failed: {type(error).__name__}: {error}") from error

        return Judgement(verdicts=await run_together(verdict(trajectory) for trajectory in group))


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
        sums = []
        for i in range(len(group)):
            verdicts = {name: judgement.verdicts[i] for name, judgement in by_name.items()}
            parts = {name: verdict.score for name, verdict in verdicts.items()}
            parts |= {f"{name}/{key}": score for name, one in verdicts.items() for key, score in one.parts.items()}
            explanation = "; ".join(f"{name}: {one.explanation}" for name, one in verdicts.items() if one.explanation)
            score = sum(self._weights[name] * verdict.score for name, verdict in verdicts.items())
            sums.append(Verdict(score=score, explanation=explanation, parts=parts))
        return Judgement(verdicts=sums, costs_usd=costs, metrics=metrics)


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


async def score_group(group: TrajectoryGroup, judge: Judge | RewardFunction) -> TrajectoryGroup:
    """Return a copy of `group` with the scores of a judge, or of a function of a trajectory, as rewards.

    Raises:
        JudgeError: there are no usable scores.
    """
    judge = as_judge(judge)
    if len(group) == 0:
        return group
    judgement = await judge.judge(group)
    scores = [verdict.score for verdict in judgement.verdicts]
    if len(scores) != len(group):
        raise JudgeError(f"judge {judge.name!r} gave {len(scores)} scores for a group of {len(group)}")
    if bad := [score for score in scores if not math.isfinite(score)]:
        raise JudgeError(f"judge {judge.name!r} gave scores that are not finite numbers: {bad}")
    name, score, trajectories = judge.name, f"{judge.name}_score", []
    for trajectory, verdict in zip(group, judgement.verdicts, strict=True):
        # A group that is judged again keeps the reward from before the first judgement.
        independent = trajectory.metrics.get("independent_reward") if score in trajectory.metrics else None
        metrics: dict[str, MetricValue] = {
            **trajectory.metrics,
            "independent_reward": trajectory.reward if independent is None else independent,
            score: verdict.score,
            **{f"{name}/{part}": value for part, value in verdict.parts.items()},
        }
        for source, usd in judgement.costs_usd.items():
            metrics[f"costs/judge/{source}"] = metrics.get(f"costs/judge/{source}", 0.0) + usd / len(group)
        told = [f"{name.upper()} explanation: {verdict.explanation}"] if verdict.explanation else []
        # Lists and dictionaries are copied too, so that the copy can be changed.
        update = {
            "reward": verdict.score, "metrics": metrics, "logs": [*trajectory.logs, *told],
            "metadata": dict(trajectory.metadata), "messages_and_choices": list(trajectory.messages_and_choices),
            "additional_histories": list(trajectory.additional_histories),
        }  # fmt: skip
        trajectories.append(trajectory.model_copy(update=update))
    return group.model_copy(update={"trajectories": trajectories, "metrics": group.metrics | judgement.metrics})


class GroupScorer:
    """Scores each group of rollouts with a judge while groups are gathered, and ends the gather if too many fail.

    Example:
        scorer = GroupScorer(Ruler("openai/o3"))
        groups = await art.gather_trajectory_groups(pending, after_each=scorer)
    """

    def __init__(
        self,
        judge: Judge | RewardFunction,
        *,
        on_fault: Literal["drop", "keep"] = "drop",
        max_fault_rate: float = 0.5,
        window: int = 32,
    ) -> None:
        """
        Args:
            on_fault: what happens to a group without scores. `drop` leaves it out. `keep` keeps it with the rewards
                of its rollouts and `metadata["outcome"] = "infra_fault"`.
            max_fault_rate: largest share of the last `window` groups that may fail before the gather is ended.
        """
        if on_fault not in ("drop", "keep"):
            raise ConfigError(f"on_fault must be 'drop' or 'keep', got {on_fault!r}; `score_group` raises")
        self._judge, self._on_fault = as_judge(judge), on_fault
        self._watch = FaultWatch(max_fault_rate, window=window, name="judge_fault", what="groups")

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        """Score a group; `None` drops it. Pass the scorer as `after_each` to `gather_trajectory_groups`.

        Raises:
            BudgetError: the judge's budget is spent.
            FaultRateError: too many of the last groups have failed.
        """
        try:
            scored = await score_group(group, self._judge)
        except JudgeError as error:
            self._watch.failed(error)
            logger.warning("a group got no scores (infra_fault, on_fault=%r): %s", self._on_fault, error)
            if self._on_fault == "drop":
                return None
            logs = [*group.logs, f"no scores (infra_fault): {error}"]
            return group.model_copy(update={"metadata": group.metadata | {"outcome": "infra_fault"}, "logs": logs})
        self._watch.succeeded()
        return scored

    @property
    def num_faults(self) -> int:
        """Number of groups without scores so far."""
        return self._watch.num_faults

    def metrics(self) -> dict[str, float]:
        """Metrics for `model.log` since the last call: the share of groups without scores, `data/judge_fault_rate`, and
        their number by kind of error, `data/judge_faults/...`."""
        return self._watch.metrics()
