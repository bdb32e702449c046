"""One arm of the comparison: a training with one `max_staleness`, and the simulation of the same training."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import Any

import art
from art.asynchronous.step import PipelineStep
from art.client.rollout_context import current_rollout
from art.task import Scenario
from art.trajectory import Trajectory
from art_recipes.training.training_loop import Evaluation, evaluate
from benchmarks.pipelines import tasks
from benchmarks.pipelines.simulation import Machine, Schedule, Simulated, Turn, simulate
from benchmarks.pipelines.tasks import NUM_TURNS, TOOL_WORKERS, RepeatTheWord, ToolCall

KINDS = ("waiting", "computing")
"""What the tools of a task do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every arm of a comparison has in common."""

    kind: str
    """One of `KINDS`, or `instant` for tools that take no time."""
    seed: int
    steps: int
    held_out: int
    """Number of held-out scenarios for the score at the end."""


@dataclass(slots=True, kw_only=True)
class Span:
    """When a rollout ran or a step was trained, in seconds from the beginning of the arm."""

    began_s: float
    ended_s: float
    step: int
    """Checkpoint that the rollout asked, or that the step began with."""


@dataclass(slots=True, kw_only=True)
class Arm:
    """What one training took and led to."""

    max_staleness: int
    wall_s: float = 0.0
    train_s: list[float] = field(default_factory=list)
    """Seconds of each training job."""
    request_s: float = 0.0
    """Mean seconds of a request."""
    tool_s: float = 0.0
    """Mean seconds of a tool."""
    trainer_idle_share: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    """Number of trained groups by staleness."""
    dropped: dict[str, float] = field(default_factory=dict)
    """Sampled tokens that were not trained, by reason."""
    sampled: float = 0.0
    num_groups: int = 0
    num_started: int = 0
    """Rollouts that were started, to see that none was thrown away."""
    rewards: list[float] = field(default_factory=list)
    score: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)
    rollouts: list[Span] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


async def run_arm(model: art.TrainableModel, plan: Plan, max_staleness: int) -> Arm:
    """Train a registered model without checkpoints, then measure it on held-out scenarios without slow tools."""
    task, arm = RepeatTheWord(), Arm(max_staleness=max_staleness)
    versions: dict[str, int] = {}
    with _tool(plan.kind) as tool:
        began_s = time.perf_counter()

        async def rollout(model: art.TrainableModel, scenario: Scenario, *, rollout_index: int) -> Trajectory:
            arm.num_started += 1
            at_s = time.perf_counter() - began_s
            trajectory = await task.rollout(model, scenario, rollout_index=rollout_index, tool=tool)
            context = current_rollout.get()
            assert context is not None
            assert context.step is not None
            versions[scenario.id] = context.step
            arm.rollouts.append(Span(began_s=at_s, ended_s=time.perf_counter() - began_s, step=context.step))
            return trajectory

        pipeline = art.pipeline(
            model, scenarios=lambda position: task.at(position, plan.seed), rollout=rollout, seed=plan.seed,
            groups_per_step=task.defaults.groups_per_step, rollouts_per_group=task.defaults.rollouts_per_group,
            max_staleness=max_staleness, max_concurrent=None,
        )  # fmt: skip
        rate = task.defaults.learning_rate
        async for step in pipeline.train(steps=plan.steps, learning_rate=rate, num_minibatches=4):
            _note(arm, step, time.perf_counter() - began_s, versions)
    arm.wall_s = arm.steps[-1].ended_s
    arm.request_s = statistics.fmean(task.times.requests_s)
    arm.tool_s = statistics.fmean(task.times.tools_s)
    arm.trainer_idle_share = 1 - sum(arm.train_s) / arm.wall_s
    evaluation: Evaluation = await evaluate(model, task, count=plan.held_out, seed=plan.seed)
    arm.score, arm.interval = evaluation.mean, evaluation.interval
    return arm


def _note(arm: Arm, step: PipelineStep, ended_s: float, versions: Mapping[str, int]) -> None:
    """Add a step of the pipeline to the figures of the arm."""
    train_s = step.timing.train_s
    arm.train_s.append(train_s)
    arm.steps.append(Span(began_s=ended_s - train_s, ended_s=ended_s, step=len(arm.steps)))
    began = [versions[str(group.trajectories[0].metadata["scenario_id"])] for group in step.groups]
    counts = Counter(len(arm.steps) - 1 - version for version in began)
    arm.staleness = dict(Counter(arm.staleness) + counts)
    for name, value in step.metrics.items():
        if name.startswith("ledger/dropped_tokens/"):
            reason = name.rpartition("/")[2]
            arm.dropped[reason] = arm.dropped.get(reason, 0.0) + value
    arm.sampled += step.metrics.get("ledger/sampled_tokens", 0.0)
    arm.num_groups += len(step.groups)
    arm.rewards.append(step.reward)


def ideal(plan: Plan, measured: Arm, max_staleness: int) -> Simulated:
    """Simulate the training with the same latencies, and with the training and request times of the synchronous arm."""
    task = RepeatTheWord()
    defaults = task.defaults

    def workload(number: int, index: int) -> list[Turn]:
        scenario = task.at(number, plan.seed)
        turns = []
        for turn in range(NUM_TURNS):
            if plan.kind == "waiting":
                turns.append(
                    Turn(engine_s=measured.request_s, tool_s=tasks.draw(tasks.WAITING, scenario.seed, index, turn))
                )
            else:
                cpu_s = tasks.draw(tasks.COMPUTING, scenario.seed, index, turn)
                turns.append(Turn(engine_s=measured.request_s, worker_s=cpu_s))
        return turns

    machine = Machine(train_s=statistics.fmean(measured.train_s), tool_workers=TOOL_WORKERS)
    schedule = Schedule(
        steps=plan.steps, groups_per_step=defaults.groups_per_step, rollouts_per_group=defaults.rollouts_per_group,
        max_staleness=max_staleness,
    )  # fmt: skip
    return simulate(workload, machine, schedule)


@contextlib.contextmanager
def _tool(kind: str) -> Iterator[ToolCall]:
    if kind == "waiting":
        yield tasks.wait_for_something
        return
    if kind == "instant":
        yield tasks.answer_at_once
        return
    with ProcessPoolExecutor(TOOL_WORKERS, mp_context=get_context("spawn")) as workers:
        list(workers.map(tasks.burn, [0.0] * TOOL_WORKERS))  # start the processes before the clock runs
        yield tasks.Compute(workers)
