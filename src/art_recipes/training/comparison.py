"""Two checkpoints on the same scenarios, judged together.

A relative judge scores each rollout against the others that it was shown. Two groups are therefore scored on two
scales, and "0.5 before, 0.7 after" from two judgements says nothing. Here the rollouts of a scenario with both
checkpoints form one group: one question, one scale. The judge shuffles them and is not told which is which.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from art.faults import FaultWatch
from art.gather import gather_trajectory_groups
from art.metrics.scores import Estimate, estimate_change, mean_with_interval
from art.model import TrainableModel
from art.rewards import GroupScorer
from art.task import Scenario, Task
from art.trajectory import Trajectory, TrajectoryGroup
from art_recipes.training.training_loop import MAX_FAULT_RATE, Evaluation

CHECKPOINT, SCENARIO = "compared_checkpoint", "compared_scenario"
"""Metadata keys under which a rollout has the step of its checkpoint and its scenario's id. Judges see no metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedScenario:
    """The rollouts of one scenario with two checkpoints, judged together on one scale. Each side has at least one."""

    scenario: Scenario
    before: Sequence[Trajectory]
    after: Sequence[Trajectory]

    @property
    def before_score(self) -> float:
        return statistics.fmean(trajectory.reward for trajectory in self.before)

    @property
    def after_score(self) -> float:
        return statistics.fmean(trajectory.reward for trajectory in self.after)

    @property
    def change(self) -> float:
        return self.after_score - self.before_score


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointComparison:
    """The result of `compare_checkpoints`: scored rollouts of the same scenarios with two checkpoints."""

    compared: Sequence[ComparedScenario]
    num_left_out: int
    """Scenarios that got no scores, or lack rollouts of one checkpoint."""
    num_failed_rollouts: int

    def evaluations(self) -> tuple[Evaluation, Evaluation]:
        """The scores of both checkpoints as evaluations, on the scale of this judgement alone."""
        before = [(item.scenario.id, item.before) for item in self.compared]
        after = [(item.scenario.id, item.after) for item in self.compared]
        return self._evaluation(before), self._evaluation(after)

    def _evaluation(self, sides: Sequence[tuple[str, Sequence[Trajectory]]]) -> Evaluation:
        mean, interval = mean_with_interval([statistics.fmean(t.reward for t in side) for _, side in sides])
        return Evaluation(
            mean=mean, interval=interval, trajectories=[trajectory for _, side in sides for trajectory in side],
            scores=[(name, trajectory.reward) for name, side in sides for trajectory in side],
        )  # fmt: skip

    def change(self) -> Estimate:
        """The change of the score, scenario by scenario."""
        before, after = self.evaluations()
        return estimate_change(before.scores, after.scores)


async def compare_checkpoints(
    model: TrainableModel,
    task: Task,
    scenarios: Sequence[Scenario],
    *,
    before: int,
    after: int,
    rollouts: int,
    score: GroupScorer,
) -> CheckpointComparison:
    """Roll out every scenario with both checkpoints, and have a judge score the rollouts together.

    The i-th rollouts of both checkpoints draw the same random numbers.

    Args:
        before, after: steps of the checkpoints.
        rollouts: rollouts of each scenario with each checkpoint.
        score: judges the rollouts of both checkpoints as one group. Groups that it drops are left out and counted.

    Raises:
        FaultRateError: more than half of the rollouts failed, or `score` dropped too many groups.
    """

    async def act(scenario: Scenario, index: int, step: int) -> Trajectory:
        trajectory = await task.rollout(model, scenario, rollout_index=index, step=step)
        trajectory.metadata |= {CHECKPOINT: step, SCENARIO: scenario.id}
        trajectory.metadata.setdefault("scenario_id", scenario.id)
        return trajectory

    groups = await gather_trajectory_groups(
        [
            TrajectoryGroup(act(scenario, i, step) for i in range(rollouts) for step in (before, after))
            for scenario in scenarios
        ],
        pbar_desc=None,
        after_each=score,
        faults=FaultWatch(MAX_FAULT_RATE, window=2 * rollouts * len(scenarios)),
    )
    by_id = {scenario.id: scenario for scenario in scenarios}
    compared = []
    for group in groups:
        sides = [[t for t in group if t.metadata[CHECKPOINT] == step] for step in (before, after)]
        if all(sides):
            scenario = by_id[str(group.trajectories[0].metadata[SCENARIO])]
            compared.append(ComparedScenario(scenario=scenario, before=sides[0], after=sides[1]))
    return CheckpointComparison(
        compared=compared,
        num_left_out=len(scenarios) - len(compared),
        num_failed_rollouts=sum(len(group.exceptions) for group in groups),
    )
