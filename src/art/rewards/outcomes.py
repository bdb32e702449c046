"""Applies judges to groups, and handles groups whose judge fails.

A group is judged as a whole or not at all. Without a judgement its outcome is `infra_fault`, and no reward is made up:
a reward of 0 would teach the policy that everything in the group was bad.
"""

from __future__ import annotations

import logging
import math
from typing import Literal

from art.errors import ConfigError, JudgeError
from art.gather.faults import FaultWatch
from art.rewards.combine import as_judge
from art.rewards.judge import Judge, RewardFunction, Verdict
from art.trajectory import MetricValue, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

OnFault = Literal["drop", "keep", "raise"]


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
    costs = {f"costs/judge/{source}": usd / len(group) for source, usd in judgement.costs_usd.items()}
    trajectories = [
        _scored(trajectory, verdict, judge.name, costs)
        for trajectory, verdict in zip(group, judgement.verdicts, strict=True)
    ]
    return group.model_copy(update={"trajectories": trajectories, "metrics": group.metrics | judgement.metrics})


def _scored(trajectory: Trajectory, verdict: Verdict, name: str, costs: dict[str, float]) -> Trajectory:
    """Copy a trajectory with its new reward. Lists and dictionaries are copied too, so that the copy can be changed."""
    score = f"{name}_score"
    # A group that is judged again keeps the reward from before the first judgement.
    independent = trajectory.metrics.get("independent_reward") if score in trajectory.metrics else None
    metrics: dict[str, MetricValue] = {
        **trajectory.metrics,
        "independent_reward": trajectory.reward if independent is None else independent,
        score: verdict.score,
        **{f"{name}/{part}": value for part, value in verdict.parts.items()},
    }
    for source, usd in costs.items():
        metrics[source] = metrics.get(source, 0.0) + usd
    logs = list(trajectory.logs)
    if verdict.explanation:
        logs.append(f"{name.upper()} explanation: {verdict.explanation}")
    return trajectory.model_copy(
        update={
            "reward": verdict.score, "metrics": metrics, "logs": logs, "metadata": dict(trajectory.metadata),
            "messages_and_choices": list(trajectory.messages_and_choices),
            "additional_histories": list(trajectory.additional_histories),
        }
    )  # fmt: skip


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
        on_fault: OnFault = "drop",
        max_fault_rate: float = 0.5,
        window: int = 32,
    ) -> None:
        """
        Args:
            on_fault: what happens to a group without scores. `drop` leaves it out. `keep` keeps it with the rewards
                of its rollouts and `metadata["outcome"] = "infra_fault"`. `raise` ends the gather.
            max_fault_rate: largest share of the last `window` groups that may fail before the gather is ended.
        """
        if on_fault not in ("drop", "keep", "raise"):
            raise ConfigError(f"on_fault must be 'drop', 'keep' or 'raise', got {on_fault!r}")
        self._judge, self._on_fault = as_judge(judge), on_fault
        self._watch = FaultWatch(max_fault_rate, window=window, name="judge_fault", what="groups")

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        """Score a group; `None` drops it. Pass the scorer as `after_each` to `gather_trajectory_groups`.

        Raises:
            BudgetError: the judge's budget is spent.
            FaultRateError: too many of the last groups have failed.
            JudgeError: the judge failed, with `on_fault="raise"`.
        """
        try:
            scored = await score_group(group, self._judge)
        except JudgeError as error:
            if self._on_fault == "raise":
                raise
            self._watch.failed(error)
            consequence = "it is dropped" if self._on_fault == "drop" else "it keeps the rewards of its rollouts"
            logger.warning("a group got no scores (infra_fault); %s: %s", consequence, error)
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
        """Metrics for `model.log` since the last call: `data/judge_fault_rate`, the share of groups without scores, and
        `data/judge_faults/...`, their number by kind of error."""
        return self._watch.metrics()
