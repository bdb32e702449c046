"""The recipe `train`, which the command `art train` calls: evaluate a model on a task, train it, evaluate it again."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import Field, model_validator

from art.errors import BudgetError, ConfigError, TrainingError
from art.local_backend import LocalBackend
from art.metrics.scores import Estimate, estimate_change
from art.metrics.verdicts import Ending, HeldOutChange
from art.model import TrainableModel
from art.rewards import GroupScorer
from art.task import Task, draw_scenarios, get_task
from art.task.names import other_task
from art_recipes.training.comparison import CheckpointComparison, compare_checkpoints
from art_recipes.training.progress import (
    Course,
    OnProgress,
    Progress,
    RecipeResult,
    Remedies,
    book_last,
    log_progress,
    reach_verdict,
    record_end,
    report_costs,
    report_verdict,
)
from art_recipes.training.recipe_config import RecipeConfig
from art_recipes.training.training_loop import (
    Evaluation,
    StepReport,
    evaluate,
    logged_evaluation,
    step_to_report,
    train_task,
)


class TaskTrainingConfig(RecipeConfig):
    """Settings of `art.recipes.train`, which trains a model on a task."""

    steps: int | None = Field(default=None, ge=0)
    """Step up to which the model is trained, by default the task's number; 0 with --held-out measures only."""
    held_out: int = Field(default=0, ge=0)
    """Held-out rollouts before and after training; 0 for no evaluation."""
    rubric: str | None = None
    """What the judge is told is good, in prose; by default the task's `rubric`, or `art.rewards.DEFAULT_RUBRIC`."""

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.steps == 0 and not self.held_out:
            raise ValueError("`steps` = 0 trains nothing; give 1 or more, or `held_out` to measure only")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTrainingResult(RecipeResult):
    """The result of `art.recipes.train`. Evaluations that were not made are `None`."""

    before: Evaluation | None
    """Evaluation on held-out scenarios before the first step."""
    after: Evaluation | None
    """Evaluation of the newest checkpoint on held-out scenarios."""
    change: Estimate | None
    """Change of the headline metric from `before` to `after`."""


async def train(
    task: Task | str,
    model: str | None = None,
    *,
    config: TaskTrainingConfig | None = None,
    backend: LocalBackend | None = None,
    on_progress: OnProgress = log_progress,
    **settings: Any,
) -> TaskTrainingResult:
    """Train a model on a task, on this machine. A later call with the same arguments continues.

    Args:
        task: the task, or its name, or `module:attribute`; in its full form, unless it is an object with options.
        model: base model to train, as in the setting `base_model`.
        config: settings as an object.
        backend: where to train, by default a new one for `data_dir`. It is closed at the end.
        on_progress: receives each line of progress.
        settings: fields of `TaskTrainingConfig`, which win over `config`.

    Raises:
        ConfigError: a setting is wrong, or the base model cannot be trained here.
        TrainingError: nothing could be learnt in several steps in a row.
        FaultRateError: too many rollouts failed, or the judge scored too few groups.
    """
    task = task if isinstance(task, Task) else get_task(task)
    config = TaskTrainingConfig.complete(config, model, settings)
    check_judge(task, config.judge)
    if backend is not None and config.server_config is not None:
        raise ConfigError(
            "`server_config` is for a server that the run starts, and `backend` has one already: leave one out"
        )
    config = config.named(name=f"{task.label}-seed{config.seed}", project=task.label)
    run = _Run(task=task, config=config, model=config.make_model(), on_progress=on_progress)
    if config.base_model is not None and (warning := other_task(task, config.base_model)):
        on_progress(Progress(warning, "warning"))
    scorer = None
    if config.judge is not None:
        scorer = GroupScorer(config.make_judge(run.model.costs, rubric=config.rubric or task.rubric))
    async with backend or LocalBackend(path=config.data_dir, server_config=config.server_config) as backend:
        on_progress(Progress("starting server, engine and trainer", "busy"))
        await run.model.register(backend)
        await config.record(run.model)
        return await run.train(scorer)


def check_judge(task: Task, judge: str | None) -> None:
    """Check that a task without a reward of its own has a judge.

    Raises:
        ConfigError: it has none.
    """
    if task.needs_judge and judge is None:
        raise ConfigError(
            f"task {task.name!r} has no reward of its own: say who judges by --judge MODEL, e.g. openai/o3. "
            f"To try it without a judge model, start `art judge serve --task {task.name}` "
            "and pass on the --judge and --judge-url that it prints"
        )


async def train_steps(
    model: TrainableModel[Any, Any],
    config: RecipeConfig,
    task: Task,
    scorer: GroupScorer | None,
    on_progress: OnProgress,
    reports: list[StepReport],
) -> None:
    """Train a model up to the last step. Each step is appended to `reports` and reported as progress."""
    defaults = config.loop_defaults(task.defaults)
    num_steps = defaults.num_steps

    def on_step(report: StepReport) -> None:
        reports.append(report)
        text = f"step {report.step:>4}/{num_steps}  {report.line(task.headline_metric)}"
        on_progress(Progress(text, part="steps", done=report.step, total=num_steps))

    first = await step_to_report(model)
    on_progress(Progress(f"training from step {first} to {num_steps}", "busy", "steps", first, num_steps))
    await train_task(
        model, task, defaults, num_steps=num_steps, seed=config.seed, on_step=on_step, score=scorer,
        pace=config.pace(defaults),
    )  # fmt: skip


class _Run:
    """One call of `train`."""

    def __init__(
        self, *, task: Task, config: TaskTrainingConfig, model: TrainableModel[Any, Any], on_progress: OnProgress
    ) -> None:
        self.task, self.config, self.model, self.on_progress = task, config, model, on_progress
        self.reports: list[StepReport] = []

    async def train(self, scorer: GroupScorer | None) -> TaskTrainingResult:
        first, num_steps = await step_to_report(self.model), self.config.loop_defaults(self.task.defaults).num_steps
        before = after = change = verdict = None
        ending: Ending = "finished"
        is_over_budget, stopped = False, ""
        self.model.merge_state({"end": None})  # this call goes on where an earlier one ended
        self.on_progress(Progress(f"{self.model.get_inference_name()} is at step {first} of {num_steps}"))
        try:
            if self.config.held_out and not self.task.needs_judge:
                if first == 0:
                    before = await self._evaluate("before")
                elif (before := logged_evaluation(self.model, self.task, step=0)) is not None:
                    self._report("before", before)
            if num_steps:
                await train_steps(self.model, self.config, self.task, scorer, self.on_progress, self.reports)
            if not self.config.held_out or first == num_steps == 0:
                pass
            elif self.task.needs_judge and scorer is not None:
                comparison = await self._compare(scorer)
                (before, after), change = comparison.evaluations(), comparison.change()
                for when, at, evaluation in (("before", 0, before), ("after", await self.model.get_step(), after)):
                    await self.model.log(evaluation.trajectories, split="test", step=at)
                    self._report(when, evaluation)
            else:
                after = await self._evaluate("after")
        except BudgetError as error:
            is_over_budget, ending, stopped, step = True, "stopped", error.message, await self.model.get_step()
            self.on_progress(Progress(f"Stopped at step {step}: {error}. Every finished step is kept"))
        except asyncio.CancelledError:
            ending, stopped = "stopped", "it was interrupted"
            raise
        except TrainingError as error:  # nothing more could be learnt
            ending, stopped = "stopped", str(error)
            raise
        except Exception as error:
            ending, stopped = "failed", str(error)
            raise
        finally:
            held_out = None
            if before is not None and after is not None:
                change = change or estimate_change(before.scores, after.scores)
                measure = f"{self.task.headline_metric} on held-out rollouts"
                held_out = HeldOutChange(measure=measure, before=before.mean, after=after.mean, difference=change)
            if self.reports or held_out is not None or ending != "finished":
                course = Course(
                    step=self.reports[-1].step if self.reports else first, num_steps=num_steps, reports=self.reports,
                    ending=ending, stopped=stopped, change=held_out,
                )  # fmt: skip
                verdict = reach_verdict(course, Remedies())
                report_verdict(self.on_progress, verdict)
                record_end(self.model, ending, course.step, verdict)
            await book_last(self.model)
            report_costs(self.on_progress, self.model.costs)
        return TaskTrainingResult(
            model=self.model, step=await self.model.get_step(), reports=self.reports, verdict=verdict,
            is_over_budget=is_over_budget, before=before, after=after, change=change,
        )  # fmt: skip

    async def _compare(self, scorer: GroupScorer) -> CheckpointComparison:
        """Have the judge score held-out rollouts from before and after training together, on one scale."""
        scenarios = draw_scenarios(self.task, "test", seed=self.config.seed, count=self.config.held_out)
        rollouts = math.ceil(self.config.held_out / len(scenarios))
        return await compare_checkpoints(
            self.model, self.task, scenarios, before=0, after=await self.model.get_step(), rollouts=rollouts,
            score=scorer,
        )  # fmt: skip

    async def _evaluate(self, when: str) -> Evaluation:
        count = self.config.held_out

        def on_rollout(num_ended: int) -> None:
            if num_ended % math.ceil(count / 20) == 0:
                part = f"held-out rollouts {when} training"
                self.on_progress(Progress(f"{num_ended} of {count} {part}", "busy", part, num_ended, count))

        on_rollout(0)
        evaluation = await evaluate(self.model, self.task, count=count, seed=self.config.seed, on_rollout=on_rollout)
        await self.model.log(evaluation.trajectories, split="test")
        step = await self.model.get_step()
        logged = logged_evaluation(self.model, self.task, step=step)
        if logged is not None and (step or when == "before"):  # an earlier call may have measured this checkpoint too
            evaluation = replace(evaluation, mean=logged.mean, interval=logged.interval, scores=logged.scores)
        self._report(when, evaluation)
        return evaluation

    def _report(self, when: str, evaluation: Evaluation) -> None:
        low, high = evaluation.interval
        rollouts = f"{len(evaluation.scores)} held-out rollouts {when} training"
        value = f"{evaluation.mean:.3f} (95 %: {low:.3f} to {high:.3f})"
        self.on_progress(Progress(f"{self.task.headline_metric} on {rollouts}: {value}"))
