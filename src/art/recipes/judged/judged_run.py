"""Runs a training whose rewards come from a judge: train, compare with the untrained policy, write the report.

    train_and_compare
      train                 the training loop, with validations on the way
      compare               newest checkpoint and step 0 on the held-out scenarios, judged together
      publish               report.html, report.json and the last lines, however the run ended

AutoRL and MCP-RL differ in where scenarios come from. From there on both are a task, a judge and a `JudgedRun`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter

from art.costs import Ledger
from art.errors import BudgetError, FaultRateError, TrainingError
from art.model import TrainableModel
from art.recipes.comparison import CheckpointComparison, ComparedScenario, compare_checkpoints
from art.recipes.progress import (
    OnProgress,
    Progress,
    ProgressKind,
    RecipeResult,
    book_last,
    ending_of,
    log_progress,
    report_costs,
    report_verdict,
)
from art.recipes.recipe_config import RecipeConfig
from art.recipes.training_loop import StepReport, step_to_report, train_task
from art.report import Headline, Report, write_report
from art.rewards import GroupScorer, JudgeSettings, Ruler
from art.rewards.ruler import DEFAULT_JUDGE
from art.storage.atomic import write_file
from art.task import Scenario, Task


class JudgedConfig(RecipeConfig):
    """Settings that the recipes `auto` and `mcp_rl` share. `auto` keeps exactly these in `run.toml`."""

    judge: str = DEFAULT_JUDGE
    """Language model that compares rollouts, as litellm names it."""
    generator: str | None = None
    """Language model that writes scenarios, as litellm names it; the judge by default."""
    generator_url: str | None = None
    """Address of an OpenAI-compatible server that serves the generator."""
    evaluate: int = Field(default=4, ge=0)
    """Rollouts of each held-out scenario before and after training; 0 for no evaluation."""
    validate_every: int | None = Field(default=None, ge=0)
    """Steps between validations; 0 for none, and by default four validations in the whole training."""

    @property
    def serves_one_step(self) -> bool:
        """Whether the engine holds one checkpoint at a time, which rules out a comparison with the untrained policy."""
        return self.full_finetuning and self.engine == "vllm"

    @property
    def writer(self) -> tuple[str, str | None]:
        """Name and address of the model that writes scenarios."""
        url = self.generator_url or (self.judge_url if self.generator is None else None)
        return self.generator or self.judge, url

    def writer_settings(self, ledger: Ledger) -> JudgeSettings:
        """Settings of requests to the model that writes scenarios. `judge_price` is used only if that is the judge."""
        settings = JudgeSettings(budget=ledger)
        return settings if self.generator else self.judge_settings(settings, ledger)


VALIDATIONS = 4
"""Validations in the course of a training, unless `validate_every` is set."""
JUDGED_CHANGE = "judged_change"
"""Metric of the split `val`: the judged score of the newest policy minus that of the untrained one."""
ONE_STEP = (
    "vLLM holds the weights of one step at a time with --full-finetuning: there is no comparison with the untrained "
    "policy. With --engine torch, or with an adapter, there is one."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedResult(RecipeResult):
    """The result of a call of AutoRL (`auto`) or MCP-RL (`mcp_rl`)."""

    report_path: Path
    """The report as a page. `report.json` beside it has the same for programs."""
    headline: Headline | None
    """Judged score on held-out scenarios `before` and `after`, with their `change`; `None` if nothing was compared."""


@dataclass(slots=True, kw_only=True)
class JudgedRun:
    """The state of one call of AutoRL or MCP-RL: settings, model, task and judge, and the results so far."""

    config: JudgedConfig
    model: TrainableModel[Any, Any]
    task: Task
    judge: Ruler
    out: Path
    """Folder of the report and of the files that it is made from."""
    clock: Clock
    command: str = ""
    """Command that repeats the run, for the report."""
    about: str = ""
    """Digest of what a comparison depends on besides checkpoint and scenarios. It is made again if this changes."""
    on_progress: OnProgress = log_progress
    step: int = 0
    """Step of the newest checkpoint."""
    comparison: CheckpointComparison | None = None
    groups_without_scores: int = 0
    stopped: str = ""
    """Why the run ended early; empty if it did not."""
    reports: list[StepReport] = field(default_factory=list)
    """The steps that this call tried."""

    def say(self, text: str, kind: ProgressKind = "note") -> None:
        self.on_progress(Progress(text, kind))


async def train_and_compare(
    run: JudgedRun, *, held_out: Sequence[Scenario], validation: Sequence[Scenario], describe: Callable[[], Report]
) -> JudgedResult:
    """Train, compare with the untrained policy, and write the report, however the run ends.

    Args:
        held_out: scenarios of the comparison after the training.
        validation: scenarios of the validations on the way. Nothing is chosen by them.
        describe: makes the report of the run as it is now.

    Raises:
        TrainingError: nothing could be learnt in several steps in a row; the comparison was made all the same.
        FaultRateError: too many rollouts failed, or the judge scored too few groups.
    """
    ended, is_over_budget = None, False
    compares = run.config.evaluate and not run.config.serves_one_step
    if run.config.evaluate and run.config.serves_one_step:
        run.say(ONE_STEP, "warning")
    try:
        try:
            await train(run, [] if run.config.serves_one_step else validation)
        except TrainingError as error:  # the policy has collapsed, or the task is solved: the comparison tells which
            ended = error
        if compares and run.step:
            await compare(run, held_out)
        if ended is not None:
            raise ended
    except BudgetError as error:
        is_over_budget, run.stopped = True, error.message
        run.say(f"Stopped at step {run.step}: {error}. Every finished step is kept")
    except asyncio.CancelledError:
        run.stopped = "it was interrupted"
        raise
    except Exception as error:
        run.stopped = str(error)
        raise
    finally:
        await book_last(run.model)
        report = describe()
        path = publish(run, report)
        report_costs(run.on_progress, run.model.costs)
    return JudgedResult(
        model=run.model, step=run.step, reports=run.reports, verdict=report.verdict, is_over_budget=is_over_budget,
        report_path=path, headline=report.headline,
    )  # fmt: skip


async def train(run: JudgedRun, validation: Sequence[Scenario]) -> None:
    """Train the run's model from its newest checkpoint up to the last step, with validations on the way."""
    defaults = run.config.loop_defaults(run.task.defaults)
    # A judge that is down ends the run at its first step, not after many.
    scorer = GroupScorer(run.judge, window=defaults.groups_per_step)
    first = await step_to_report(run.model)
    run.say(f"{run.model.get_inference_name()} is at step {first} of {defaults.num_steps}")

    def on_step(report: StepReport) -> None:
        run.clock.add("rollouts and judging", report.timing.rollout_s)
        run.clock.add("training", report.timing.train_s)
        run.clock.add("publishing", report.timing.publish_s)
        run.step = report.step
        run.reports.append(report)
        run.say(f"step {report.step:>4}/{defaults.num_steps}  {report.line(run.task.headline_metric)}")
        if report.ending is not None:
            run.say(f"Stopped at step {report.step}: {report.ending}", "warning")

    every = run.config.validate_every
    every = max(1, defaults.num_steps // VALIDATIONS) if every is None else every

    async def after_step() -> None:
        if every and validation and run.step % every == 0:
            await validate(run, validation)

    try:
        await train_task(
            run.model, run.task, defaults, num_steps=defaults.num_steps, seed=run.config.seed, on_step=on_step,
            score=scorer, rollout_timeout_s=run.config.rollout_timeout, after_step=after_step,
            reactions=run.config.reactions(), pace=run.config.pace(defaults),
        )  # fmt: skip
        run.stopped = ending_of(run.reports) or run.stopped
        run.step = await run.model.get_step()
    finally:
        run.groups_without_scores += scorer.num_faults


async def validate(run: JudgedRun, scenarios: Sequence[Scenario]) -> None:
    """Log how far the newest policy is ahead of the untrained one, by one rollout of each on each scenario.

    A judge that fails here costs this validation and nothing else.
    """
    run.say(f"validation: {len(scenarios)} scenarios ...", "busy")
    with run.clock.measure("validation"):
        try:
            comparison = await _compare(run, scenarios, rollouts=1)
        except FaultRateError as error:
            run.say(f"no validation at step {run.step}: {error.message}", "warning")
            return
    if not comparison.compared:
        return
    before = statistics.fmean(item.before_score for item in comparison.compared)
    after = statistics.fmean(item.after_score for item in comparison.compared)
    await run.model.log(split="val", step=run.step, metrics={JUDGED_CHANGE: after - before})
    scores = f"{before:.2f} untrained, {after:.2f} now"
    run.say(f"validation at step {run.step}: {scores}, on {len(comparison.compared)} scenarios")


async def compare(run: JudgedRun, scenarios: Sequence[Scenario]) -> None:
    """Compare the newest checkpoint with the untrained policy, unless the folder has this comparison already."""
    rollouts, step, about = run.config.evaluate, run.step, run.about
    run.comparison = load_comparison(run.out, step=step, rollouts=rollouts, scenarios=scenarios, about=about)
    if run.comparison is not None:
        return
    run.say(f"{len(scenarios)} held-out scenarios, {rollouts} rollouts before and after ...", "busy")
    with run.clock.measure("held-out evaluation"):
        run.comparison = await _compare(run, scenarios, rollouts=rollouts)
    save_comparison(run.out, run.comparison, step=step, rollouts=rollouts, about=about)
    for at, side in ((0, "before"), (step, "after")):
        trajectories = [t for item in run.comparison.compared for t in getattr(item, side)]
        await run.model.log(trajectories, split="test", step=at)


async def _compare(run: JudgedRun, scenarios: Sequence[Scenario], *, rollouts: int) -> CheckpointComparison:
    return await compare_checkpoints(
        run.model, run.task, scenarios, before=0, after=run.step, rollouts=rollouts,
        score=GroupScorer(run.judge, window=len(scenarios)), rollout_timeout_s=run.config.rollout_timeout,
    )  # fmt: skip


def publish(run: JudgedRun, report: Report) -> Path:
    """Write the report as a page, report its result as progress, and return the path of the page."""
    path = write_report(run.out, report)
    if (headline := report.headline) is not None:
        run.say(
            f"{headline.measure}: {headline.before.text()} before, {headline.after.text()} after; change "
            f"{headline.change.text(sign=True)}"
        )
    if report.verdict is not None:
        report_verdict(run.on_progress, report.verdict)
    run.say(f"report  {path}")
    return path


@dataclass(slots=True)
class Clock:
    """Seconds spent on each activity, summed over all calls of a recipe in a file that each addition rewrites."""

    path: Path
    seconds: dict[str, float]

    @classmethod
    def load(cls, out: Path) -> Clock:
        path = out / "seconds.json"
        return cls(path, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})

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


EVALUATION_FILE = "evaluation.jsonl"
_ROW = TypeAdapter(ComparedScenario)


def save_comparison(out: Path, comparison: CheckpointComparison, *, step: int, rollouts: int, about: str = "") -> None:
    head = {
        "step": step, "rollouts": rollouts, "about": about, "num_left_out": comparison.num_left_out,
        "num_failed_rollouts": comparison.num_failed_rollouts, "seconds": comparison.seconds,
    }  # fmt: skip
    rows = [head, *(_ROW.dump_python(item, mode="json") for item in comparison.compared)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_file(out / EVALUATION_FILE, lines.encode())


def load_comparison(
    out: Path, *, step: int, rollouts: int, scenarios: Sequence[Scenario], about: str = ""
) -> CheckpointComparison | None:
    """Load the comparison of two checkpoints that an earlier call saved in `out`.

    Returns:
        `None` if it was made with other arguments or scenarios, or lacks scenarios, so that it has to be made again.
    """
    path = out / EVALUATION_FILE
    if not path.exists():
        return None
    head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    compared = [_ROW.validate_python(row) for row in rows]
    same = (head["step"], head["rollouts"], head["about"]) == (step, rollouts, about)
    if not same or head["num_left_out"] or [item.scenario for item in compared] != list(scenarios):
        return None
    return CheckpointComparison(
        compared=compared, num_left_out=0, num_failed_rollouts=head["num_failed_rollouts"], seconds=head["seconds"]
    )
