"""Runs a training whose rewards come from a judge: train, compare with the untrained policy, write the report.

    train_and_compare
      train                 the training loop
      compare               newest checkpoint and step 0 on the held-out scenarios, judged together
      publish               report.html, report.json and the last lines, however the run ended

AutoRL and MCP-RL differ in where scenarios come from. From there on both are a task, a judge and a `JudgedRun`.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from art.costs import Ledger
from art.errors import BudgetError, TrainingError
from art.metrics.scores import estimate
from art.metrics.verdicts import Ending, HeldOutChange
from art.model import TrainableModel
from art.rewards import GroupScorer, JudgeSettings, Ruler
from art.rewards.ruler import DEFAULT_JUDGE
from art.storage.history import means_by_step
from art.storage.layout import DataDir
from art.task import Scenario, Task
from art.trajectory import Trajectory
from art_recipes.report import (
    Headline,
    Report,
    ScoredRollout,
    SideBySide,
    write_report,
)
from art_recipes.training.comparison import CheckpointComparison, ComparedScenario, compare_checkpoints
from art_recipes.training.progress import (
    Course,
    OnProgress,
    Progress,
    ProgressKind,
    RecipeResult,
    Remedies,
    book_last,
    describe_faults,
    describe_untrained,
    log_progress,
    reach_verdict,
    record_end,
    report_costs,
    report_verdict,
)
from art_recipes.training.recipe_config import RecipeConfig
from art_recipes.training.task_training import train_steps
from art_recipes.training.training_loop import StepReport, step_to_report


class JudgedConfig(RecipeConfig):
    """Settings that the recipes `auto` and `mcp_rl` share."""

    judge: str = DEFAULT_JUDGE
    """Language model that compares rollouts, as litellm names it."""
    generator: str | None = None
    """Language model that writes scenarios, as litellm names it; the judge by default."""
    generator_url: str | None = None
    """Address of an OpenAI-compatible server that serves the generator."""
    held_out_rollouts: int = Field(default=4, ge=0)
    """Rollouts of each held-out scenario before and after training; 0 for no evaluation."""

    @property
    def writer(self) -> tuple[str, str | None]:
        """Name and address of the model that writes scenarios."""
        url = self.generator_url or (self.judge_url if self.generator is None else None)
        return self.generator or self.judge, url

    def writer_settings(self, ledger: Ledger) -> JudgeSettings:
        """Settings of requests to the model that writes scenarios. `judge_price` is used only if that is the judge."""
        settings = JudgeSettings(budget=ledger)
        return settings if self.generator else self.judge_settings(settings, ledger)


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
    """Folder of the report."""
    command: str = ""
    """Command that repeats the run, for the report."""
    on_progress: OnProgress = log_progress
    step: int = 0
    """Step of the newest checkpoint."""
    comparison: CheckpointComparison | None = None
    groups_without_scores: int = 0
    ending: Ending = "finished"
    stopped: str = ""
    """Why the run ended early; empty if it did not."""
    reports: list[StepReport] = field(default_factory=list)
    """The steps that this call tried."""

    @property
    def compared(self) -> Sequence[ComparedScenario]:
        return () if self.comparison is None else self.comparison.compared

    def say(self, text: str, kind: ProgressKind = "note") -> None:
        self.on_progress(Progress(text, kind))


async def train_and_compare(
    run: JudgedRun, *, held_out: Sequence[Scenario], describe: Callable[[], Report]
) -> JudgedResult:
    """Train, compare with the untrained policy, and write the report, however the run ends.

    Args:
        held_out: scenarios of the comparison after the training.
        describe: makes the report of the run as it is now.

    Raises:
        TrainingError: nothing could be learnt in several steps in a row; the comparison was made all the same.
        FaultRateError: too many rollouts failed, or the judge scored too few groups.
    """
    ended, is_over_budget = None, False
    run.model.merge_state({"end": None})  # this call goes on where an earlier one ended
    compares = run.config.held_out_rollouts and not run.config.serves_one_step
    if run.config.held_out_rollouts and run.config.serves_one_step:
        run.say(ONE_STEP, "warning")
    try:
        try:
            await train(run)
        except TrainingError as error:  # the policy has collapsed, or the task is solved: the comparison tells which
            ended = error
        if compares and run.step:
            await compare(run, held_out)
        if ended is not None:
            raise ended
    except BudgetError as error:
        is_over_budget, run.ending, run.stopped = True, "stopped", error.message
        run.say(f"Stopped at step {run.step}: {error}. Every finished step is kept")
    except asyncio.CancelledError:
        run.ending, run.stopped = "stopped", "it was interrupted"
        raise
    except Exception as error:
        run.ending = "stopped" if error is ended else "failed"
        run.stopped = str(error)
        raise
    finally:
        await book_last(run.model)
        report = describe()
        if report.verdict is not None:
            record_end(run.model, run.ending, run.step, report.verdict)
        path = publish(run, report)
        report_costs(run.on_progress, run.model.costs)
    return JudgedResult(
        model=run.model, step=run.step, reports=run.reports, verdict=report.verdict, is_over_budget=is_over_budget,
        report_path=path, headline=report.headline,
    )  # fmt: skip


async def train(run: JudgedRun) -> None:
    """Train the run's model from its newest checkpoint up to the last step."""
    defaults = run.config.loop_defaults(run.task.defaults)
    # A judge that is down ends the run at its first step, not after many.
    scorer = GroupScorer(run.judge, window=defaults.groups_per_step)
    first = await step_to_report(run.model)
    run.say(f"{run.model.get_inference_name()} is at step {first} of {defaults.num_steps}")
    try:
        await train_steps(run.model, run.config, run.task, scorer, run.on_progress, run.reports)
        run.step = await run.model.get_step()
    finally:
        run.step = max(run.step, *(report.step for report in run.reports), 0)
        run.groups_without_scores += scorer.num_faults


async def compare(run: JudgedRun, scenarios: Sequence[Scenario]) -> None:
    """Compare the newest checkpoint with the untrained policy."""
    rollouts, step = run.config.held_out_rollouts, run.step
    run.say(f"{len(scenarios)} held-out scenarios, {rollouts} rollouts before and after ...", "busy")
    run.comparison = await compare_checkpoints(
        run.model, run.task, scenarios, before=0, after=step, rollouts=rollouts,
        score=GroupScorer(run.judge, window=len(scenarios)),
    )  # fmt: skip
    for at, side in ((0, "before"), (step, "after")):
        trajectories = [t for item in run.comparison.compared for t in getattr(item, side)]
        await run.model.log(trajectories, split="test", step=at)


def publish(run: JudgedRun, report: Report) -> Path:
    """Write the report as a page, report its result as progress, and return the path of the page."""
    path = write_report(run.out, report)
    if (line := report.headline) is not None:
        change = line.change.text(sign=True)
        run.say(f"{line.measure}: {line.before.text()} before, {line.after.text()} after; change {change}")
    if report.verdict is not None:
        report_verdict(run.on_progress, report.verdict)
    run.say(f"report  {path}")
    return path


_EXPLANATION = "RULER explanation: "


def make_report(
    run: JudgedRun,
    *,
    title: str,
    summary: str,
    remedies: Remedies,
    text_of: Callable[[Scenario], str],
    note_of: Callable[[Trajectory], str],
) -> Report:
    """Make the report of a run from its results so far.

    Args:
        text_of: returns a scenario as text for people.
        note_of: returns a few words about how a rollout ended.
    """
    headline = None
    if run.comparison is not None and run.compared:
        headline = Headline(
            measure=f"judged score on {len(run.compared)} held-out scenarios, {run.config.held_out_rollouts} rollouts "
            "of each before and after", change=run.comparison.change(),
            before=estimate([item.before_score for item in run.compared]),
            after=estimate([item.after_score for item in run.compared]),
        )  # fmt: skip
    course = course_of(run, headline, remedies.endings)
    return Report(
        title=title, summary=summary, headline=headline, verdict=reach_verdict(course, remedies),
        rewards=history_of(run, "train/reward"), comparisons=side_by_side(run.compared, text_of, note_of),
        costs="\n".join(run.model.costs.lines()),
        faults=faults_of(run, course), command=run.command,
    )  # fmt: skip


def history_of(run: JudgedRun, metric: str) -> list[tuple[int, float]]:
    """Pairs of a step and a metric's mean at that step, over all calls that trained the model."""
    folder = DataDir(run.config.data_dir).model(run.model.project, run.model.name)
    return sorted(means_by_step(folder.history, metric)[0].items())


def side_by_side(
    compared: Sequence[ComparedScenario], text_of: Callable[[Scenario], str], note_of: Callable[[Trajectory], str]
) -> list[SideBySide]:
    """Describe each scenario, the largest gain first.

    Its two rollouts are those with equal random numbers whose change is closest to that of the scenario.
    """

    def shown(trajectory: Trajectory) -> ScoredRollout:
        messages: list[Any] = list(trajectory.messages())
        explanation = next((log for log in reversed(trajectory.logs) if log.startswith(_EXPLANATION)), "")
        return ScoredRollout(
            messages=messages, score=trajectory.reward, note=note_of(trajectory),
            explanation=explanation.removeprefix(_EXPLANATION),
        )  # fmt: skip

    sides = []
    for item in sorted(compared, key=lambda item: -item.change):
        change, pairs = item.change, list(zip(item.before, item.after, strict=False))
        before, after = min(pairs, key=lambda pair: abs(pair[1].reward - pair[0].reward - change))
        sides.append(
            SideBySide(
                scenario=text_of(item.scenario), before_score=item.before_score, after_score=item.after_score,
                before=shown(before), after=shown(after),
            )
        )  # fmt: skip
    return sides


def course_of(run: JudgedRun, headline: Headline | None, endings: Iterable[str]) -> Course:
    """Collect the facts about a training from which its verdict is made.

    Args:
        headline: result of the comparison, if one was made.
        endings: metrics that are 1 for a rollout that the policy spoilt in this way.
    """
    first = run.reports[0].step if run.reports else 0
    shares = {}
    for name in endings:
        values = [share for step, share in history_of(run, f"train/{name}") if step >= first]
        shares[name] = statistics.fmean(values) if values else 0.0
    return Course(
        step=run.step, num_steps=run.config.loop_defaults(run.task.defaults).num_steps, reports=run.reports,
        ending=run.ending, stopped=run.stopped, endings=shares,
        change=None if headline is None else HeldOutChange(
            measure="judged score on held-out scenarios", before=headline.before.mean, after=headline.after.mean,
            difference=headline.change,
        ),
    )  # fmt: skip


def faults_of(run: JudgedRun, course: Course) -> list[str]:
    """What went wrong in a run, one sentence each; if nothing did, one sentence that says so."""
    faults = [f"The run ended early: {run.stopped}"] if run.stopped else []
    faults += [text for text in (describe_untrained(course), describe_faults(course)) if text]
    if run.config.serves_one_step:
        faults.append(ONE_STEP)
    missing, failed = (run.comparison.num_left_out, run.comparison.num_failed_rollouts) if run.comparison else (0, 0)
    counts = {
        "groups of the last call got no scores from the judge and were left out.": run.groups_without_scores,
        "held-out scenarios are missing: they got no scores, or one side has no rollout.": missing,
        "held-out rollouts failed, through no fault of the policy.": failed,
    }
    faults += [f"{count} {text}" for text, count in counts.items() if count]
    return faults or ["Nothing: every group was judged and every step trained, and no rollout failed in the last call."]


def trained_part(config: RecipeConfig) -> str:
    lora = config.model_settings().lora
    return "all weights" if lora is None else f"an adapter of rank {lora.rank}"
