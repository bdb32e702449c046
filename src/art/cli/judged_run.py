"""What commands that train on a judge have in common: train, compare with the untrained policy, report, keep time.

`art mcp-rl` and `art auto` differ in where scenarios come from; from there on both are a task and a judge. Beside the
report they keep

evaluation.jsonl   the rollouts of the held-out scenarios with their scores, before and after
seconds.json       wall time by what it was spent on, over all calls
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from art.cli.options.cost_options import EXIT_BUDGET, book_last, show_costs
from art.cli.options.train_options import loop_defaults
from art.cli.verdict import EXIT_UNTRAINED, show_verdict
from art.errors import BudgetError, FaultRateError, TrainingError
from art.model import TrainableModel
from art.recipes.comparison import CheckpointComparison, ComparedScenario, compare_checkpoints
from art.recipes.training_loop import StepReport, train_task
from art.report import Report, write_report
from art.rewards import GroupScorer, Ruler
from art.storage.atomic import write_file
from art.task import Scenario, Task
from art.trajectory import Trajectory

VALIDATIONS = 4
"""Looks at the validation scenarios in the course of a training, unless told otherwise."""
JUDGED_CHANGE = "judged_change"
"""Metric of the split `val`: the judged score of the newest policy less that of the untrained one."""
ONE_STEP = (
    "vLLM holds the weights of one step at a time with --full-finetuning: there is no comparison with the untrained "
    "policy. With --engine torch, or with an adapter, there is one."
)


@dataclass(slots=True)
class Clock:
    """Wall time by what it was spent on, over all calls of the command."""

    path: Path
    seconds: dict[str, float]

    @classmethod
    def load(cls, out: Path) -> Clock:
        path = out / "seconds.json"
        return cls(path, json.loads(path.read_text()) if path.exists() else {})

    def add(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds
        write_file(self.path, (json.dumps(self.seconds, indent=2) + "\n").encode())

    @contextlib.contextmanager
    def measure(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - started)


@dataclass(slots=True, kw_only=True)
class JudgedRun:
    """What is known of a run."""

    args: argparse.Namespace
    command: str
    model: TrainableModel[Any, Any]
    clock: Clock
    step: int = 0
    """The newest checkpoint."""
    comparison: CheckpointComparison | None = None
    groups_without_scores: int = 0
    stopped: str = ""
    """Why it ended before its end."""
    reports: list[StepReport] = field(default_factory=list)
    """The steps that this call has tried."""

    @property
    def serves_one_step(self) -> bool:
        """Whether the untrained policy is gone once there is a newer one, so that nothing can be compared with it."""
        return bool(self.args.full_finetuning) and self.args.engine == "vllm"


async def train_and_compare(
    run: JudgedRun,
    task: Task,
    judge: Ruler,
    console: Console,
    *,
    out: Path,
    held_out: Sequence[Scenario],
    validation: Sequence[Scenario],
    about: str = "",
    describe: Callable[[], Report],
) -> int:
    """Train, compare, and write the report, whatever happens; the exit code. It is not 0 if no step could be trained.

    Args:
        validation: scenarios for the looks on the way. Nothing is chosen by them.
        about: what the comparison depends on besides checkpoint and scenarios.
        describe: the report of the run as it stands.
    """
    status, ended = 0, None
    if run.serves_one_step and run.args.evaluate:
        console.print(ONE_STEP, style="yellow", highlight=False, soft_wrap=True)
    try:
        try:
            await train_run(run, task, judge, console, [] if run.serves_one_step else validation)
        except TrainingError as error:  # the policy has collapsed, or the task is solved: the comparison tells which
            ended = error
        if run.args.evaluate and run.step and not run.serves_one_step:
            await compare_run(run, task, judge, console, out=out, scenarios=held_out, about=about)
        if ended is not None:
            raise ended
    except BudgetError as error:
        status, run.stopped = EXIT_BUDGET, error.message
        console.print(f"Stopped at step {run.step}: {error}. Every finished step is kept", highlight=False,
                      soft_wrap=True)  # fmt: skip
    except asyncio.CancelledError:
        run.stopped = "it was interrupted"
        raise
    except Exception as error:
        run.stopped = str(error)
        raise
    finally:
        await book_last(run.model)
        publish_report(console, out, describe())
        show_costs(console, run.model.costs)
    untrained = bool(run.reports) and not any(report.trained for report in run.reports)
    return status or (EXIT_UNTRAINED if untrained else 0)


async def train_run(run: JudgedRun, task: Task, judge: Ruler, console: Console, validation: Sequence[Scenario]) -> None:
    """Up to `--steps`, from wherever the model stands."""
    defaults = loop_defaults(task.defaults, run.args)
    # A judge that is down ends the run at its first step, not after many.
    scorer = GroupScorer(judge, window=defaults.groups_per_step)
    console.print(f"{run.model.get_inference_name()} stands at step {run.step} of {defaults.num_steps}")

    def on_step(report: StepReport) -> None:
        run.clock.add("rollouts and judging", report.timing.rollout_s)
        run.clock.add("training", report.timing.train_s)
        run.clock.add("publishing", report.timing.publish_s)
        run.step += report.trained
        run.reports.append(report)
        line = report.line(task.headline_metric)
        console.print(f"step {report.step:>4}  {line}", highlight=False, soft_wrap=True)

    every = run.args.validate_every
    every = max(1, defaults.num_steps // VALIDATIONS) if every is None else every

    async def after_step() -> None:
        if every and validation and run.step % every == 0:
            await validate_run(run, task, judge, console, validation)

    try:
        await train_task(
            run.model, task, defaults, num_steps=defaults.num_steps, seed=run.args.seed, on_step=on_step,
            score=scorer, rollout_timeout_s=run.args.rollout_timeout, after_step=after_step,
        )  # fmt: skip
        run.step = await run.model.get_step()
    finally:
        run.groups_without_scores += scorer.num_faults


async def validate_run(
    run: JudgedRun, task: Task, judge: Ruler, console: Console, scenarios: Sequence[Scenario]
) -> None:
    """One rollout of the newest policy and one of the untrained policy on each scenario; logs how far they are apart.

    A judge that fails here costs no more than this look.
    """
    with run.clock.measure("validation"), console.status(f"validation: {len(scenarios)} scenarios ..."):
        try:
            found = await compare_checkpoints(
                run.model, task, scenarios, before=0, after=run.step, rollouts=1,
                score=GroupScorer(judge, window=len(scenarios)), rollout_timeout_s=run.args.rollout_timeout,
            )  # fmt: skip
        except FaultRateError as error:
            console.print(f"no validation at step {run.step}: {error.message}", style="yellow", soft_wrap=True)
            return
    if not found.compared:
        return
    before = statistics.fmean(item.before_score for item in found.compared)
    after = statistics.fmean(item.after_score for item in found.compared)
    await run.model.log(split="val", step=run.step, metrics={JUDGED_CHANGE: after - before})
    console.print(
        f"validation at step {run.step}: {before:.2f} untrained, {after:.2f} now, on {len(found.compared)} scenarios",
        highlight=False,
    )


async def compare_run(
    run: JudgedRun,
    task: Task,
    judge: Ruler,
    console: Console,
    *,
    out: Path,
    scenarios: Sequence[Scenario],
    about: str = "",
) -> None:
    """The newest checkpoint beside step 0, `--evaluate` rollouts of each on every scenario.

    Args:
        about: what else the result depends on. While nothing has changed an earlier one is taken from `out`.
    """
    rollouts, step = run.args.evaluate, run.step
    run.comparison = load_comparison(out, step=step, rollouts=rollouts, scenarios=scenarios, about=about)
    if run.comparison is not None:
        return
    with (
        run.clock.measure("held-out evaluation"),
        console.status(f"{len(scenarios)} held-out scenarios, {rollouts} rollouts before and after ..."),
    ):
        run.comparison = await compare_checkpoints(
            run.model, task, scenarios, before=0, after=step, rollouts=rollouts,
            score=GroupScorer(judge, window=len(scenarios)), rollout_timeout_s=run.args.rollout_timeout,
        )  # fmt: skip
    save_comparison(out, run.comparison, step=step, rollouts=rollouts, about=about)
    for at, side in ((0, "before"), (step, "after")):
        trajectories = [t for item in run.comparison.compared for t in getattr(item, side)]
        await run.model.log(trajectories, split="test", step=at)


def publish_report(console: Console, out: Path, report: Report) -> None:
    """Write the page, and show where it is and what the result was."""
    path = write_report(out, report)
    if report.headline is not None:
        headline = report.headline
        console.print(
            f"{headline.measure}: {headline.before.text()} before, {headline.after.text()} after; change "
            f"{headline.change.text(sign=True)}", highlight=False, soft_wrap=True,
        )  # fmt: skip
    if report.verdict is not None:
        show_verdict(console, report.verdict)
    console.print(f"report  {path}", highlight=False, soft_wrap=True)


def save_comparison(out: Path, comparison: CheckpointComparison, *, step: int, rollouts: int, about: str = "") -> None:
    head = {
        "step": step, "rollouts": rollouts, "about": about, "num_left_out": comparison.num_left_out,
        "num_failed_rollouts": comparison.num_failed_rollouts, "seconds": comparison.seconds,
    }  # fmt: skip
    rows: list[dict[str, Any]] = [head]
    for item in comparison.compared:
        sides = {"before": item.before, "after": item.after}
        rows.append(
            {"scenario": item.scenario.model_dump(mode="json")}
            | {side: [t.model_dump(mode="json") for t in trajectories] for side, trajectories in sides.items()}
        )
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_file(out / "evaluation.jsonl", lines.encode())


def load_comparison(
    out: Path, *, step: int, rollouts: int, scenarios: Sequence[Scenario], about: str = ""
) -> CheckpointComparison | None:
    """What `save_comparison` wrote with the same arguments and for those scenarios; `None` if there is none."""
    path = out / "evaluation.jsonl"
    if not path.exists():
        return None
    head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    compared = [
        ComparedScenario(
            scenario=Scenario.model_validate(row["scenario"]),
            before=[Trajectory.model_validate(item) for item in row["before"]],
            after=[Trajectory.model_validate(item) for item in row["after"]],
        )
        for row in rows
    ]
    same = (head["step"], head["rollouts"], head["about"]) == (step, rollouts, about)
    if not same or head["num_left_out"] or [item.scenario for item in compared] != list(scenarios):
        return None
    return CheckpointComparison(
        compared=compared, num_left_out=0, num_failed_rollouts=head["num_failed_rollouts"], seconds=head["seconds"]
    )
