"""Two checkpoints on the same scenarios, judged together.

A judge that compares says how well a rollout did beside the others that it was shown. Its numbers for two groups are
two scales, so "0.5 before, 0.7 after" from two judgements says nothing. Here all rollouts of a scenario, those of both
checkpoints, are one group: one question, one scale. The judge shuffles them and is not told which is which.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from art.gather import gather_trajectory_groups
from art.gather.faults import FaultWatch
from art.model import TrainableModel
from art.rewards import GroupScorer
from art.task import Scenario, Task
from art.trajectory import Trajectory, TrajectoryGroup

MAX_FAULT_RATE = 0.5
CHECKPOINT = "compared_checkpoint"
"""Metadata of a rollout: the step that it acted with. Judges are shown messages and tools, never metadata."""
SCENARIO = "compared_scenario"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedScenario:
    """The rollouts of one scenario, scored on one scale; each side has at least one."""

    scenario: Scenario
    before: Sequence[Trajectory]
    after: Sequence[Trajectory]

    @property
    def before_score(self) -> float:
        return statistics.fmean(trajectory.reward for trajectory in self.before)

    @property
    def after_score(self) -> float:
        return statistics.fmean(trajectory.reward for trajectory in self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointComparison:
    compared: Sequence[ComparedScenario]
    num_left_out: int
    """Scenarios without scores, or without a rollout on one of the sides."""
    num_failed_rollouts: int
    seconds: float


async def compare_checkpoints(
    model: TrainableModel,
    task: Task,
    scenarios: Sequence[Scenario],
    *,
    before: int,
    after: int,
    rollouts: int,
    score: GroupScorer,
    rollout_timeout_s: float | None = None,
) -> CheckpointComparison:
    """`rollouts` with each of the two steps on every scenario; those of a pair draw the same random numbers.

    Args:
        score: judges the rollouts of both steps as one group; a group that it drops is left out, and counted.

    Raises:
        FaultRateError: more than half of the rollouts failed, or of the groups that `score` watches.
    """
    started = time.perf_counter()

    async def act(scenario: Scenario, index: int, step: int) -> Trajectory:
        trajectory = await task.rollout(model, scenario, rollout_index=index, step=step)
        trajectory.metadata |= {CHECKPOINT: step, SCENARIO: scenario.id}
        return trajectory

    groups = await gather_trajectory_groups(
        [
            TrajectoryGroup(act(scenario, i, step) for i in range(rollouts) for step in (before, after))
            for scenario in scenarios
        ],
        pbar_desc=None,
        after_each=score,
        faults=FaultWatch(MAX_FAULT_RATE, window=2 * rollouts * len(scenarios)),
        rollout_timeout_s=rollout_timeout_s,
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
        seconds=time.perf_counter() - started,
    )
