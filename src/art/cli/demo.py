"""`art demo`: make a tiny model, train it by reinforcement learning, and show that it got better.

tiny model (warm start by SFT) --> evaluate --> train step after step --> evaluate --> before/after, picture, summary
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from art.backends.local import LocalBackend
from art.cli.arguments import TASK_HELP, add_task_options, config_of, task_for
from art.cli.output import EXIT_UNTRAINED, run_coroutine
from art.cli.screen import ProgressPrinter, Screen, print_page_line, progress_bar
from art.cli.terminal.picture import draw_learning_curve
from art.cli.tiny_model import build_with_progress
from art.client.interrupt import EXIT_INTERRUPTED, stopped
from art.config import EngineConfig, ModelSettings, VllmConfig
from art.errors import ConfigError, TrainingError
from art.model import TrainableModel
from art.recipes.progress import report_verdict
from art.recipes.recipe_config import RecipeConfig, reported_to
from art.recipes.task_training import check_judge
from art.recipes.training_loop import Evaluation, StepReport, evaluate, train_task
from art.recipes.verdict import Course, Remedies, reach_verdict
from art.report import estimate_change
from art.task import Task

EVALUATION_SEED = 20_000
"""Seed of the held-out scenarios, which is the same for every training seed so that seeds can be compared."""


@dataclass(slots=True, kw_only=True)
class Stopwatch:
    """Wall time of a demo since its start, and its parts for rollouts, training and loading checkpoints, in seconds.

    Evaluation counts as rollouts, and the warm start as training. The rest goes to starting processes, submitting,
    logging and drawing.
    """

    started: float
    rollout_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    warm_start_s: float = 0.0

    def summary(self) -> dict[str, float]:
        wall_s = time.perf_counter() - self.started
        other_s = wall_s - self.rollout_s - self.train_s - self.publish_s
        return {
            "wall_s": wall_s, "rollout_s": self.rollout_s, "train_s": self.train_s, "publish_s": self.publish_s,
            "other_s": other_s, "warm_start_s": self.warm_start_s,
        }  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", default="tic_tac_toe", help=f"{TASK_HELP} (default: tic_tac_toe)")
    add_task_options(parser)
    parser.add_argument("--base-model", help="hub id or local path (default: a tiny model made for the task)")
    parser.add_argument("--steps", type=int, help="training steps (default: the task's own)")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the scenarios and the sampling (default: 0)")
    parser.add_argument("--games", type=int, default=400, help="held-out rollouts before and after (default: 400)")
    parser.add_argument(
        "--engine", choices=["torch", "vllm"], default="torch",
        help="what samples: the embedded engine, or vLLM, whose environment ART_VLLM_PYTHON names (default: torch)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, help="folder for the model, data and picture (default: demo/<task>-seed<seed>)"
    )
    parser.add_argument(
        "--report", nargs="+", default=[], metavar="TRACKER", help="trackers that get metrics and sample rollouts"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a summary that scripts can read")


def run(args: argparse.Namespace) -> int:
    console = Screen()
    config_of(RecipeConfig, args)  # refuses a number that the option cannot have
    if args.games < 1:
        raise ConfigError(f"`--games` must be 1 or more, got {args.games}")
    task = task_for(console, args, args.base_model)
    check_judge(task, None)
    out = (args.out or Path("demo") / f"{task.label}-seed{args.seed}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        demo = _Demo(console, task, args, out, Stopwatch(started=time.perf_counter()))
        with demo.make_backend() as backend:
            return run_coroutine(demo.run(backend, demo.base_model()))
    except KeyboardInterrupt:
        where = stopped()  # without a step as long as the model is not registered, e.g. in the warm start
        kept = " before the training began" if where == "stopped" else f"; every finished step is kept in {out}"
        console.print(f"\n{where}{kept}", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    except TrainingError as error:
        console.print(str(error), style="red")
        return 1


@dataclass(frozen=True, slots=True)
class _Demo:
    """One call of `art demo`."""

    console: Console
    task: Task
    args: argparse.Namespace
    out: Path
    watch: Stopwatch

    @property
    def num_steps(self) -> int:
        return self.task.defaults.num_steps if self.args.steps is None else self.args.steps

    @property
    def settings(self) -> ModelSettings:
        return ModelSettings(engine=VllmConfig() if self.args.engine == "vllm" else EngineConfig())

    def make_backend(self) -> LocalBackend:
        """A backend with a new folder each time: the demo shows one complete training and continues no older one.

        Its server starts while the tiny model is made.
        """
        data_dir = Path(tempfile.mkdtemp(prefix="run-", dir=self.out))
        backend = LocalBackend(path=data_dir)
        if self.args.base_model is None:
            backend.start()
        return backend

    def base_model(self) -> str:
        """The base model, which is built if none is given. In a coroutine Ctrl-C would not end the warm start."""
        detail = f": {self.task.description} (seed {self.args.seed}, {self.num_steps} steps)"
        self.console.print(Text.assemble(("ART demo", "bold"), detail))
        if self.args.base_model is not None:
            return str(self.args.base_model)
        head_dim = 32 if self.args.engine == "vllm" else 16
        path, seconds = build_with_progress(
            self.console, self.out / "model", task=self.task, seed=self.args.seed, head_dim=head_dim
        )
        self.watch.warm_start_s = seconds
        self.watch.train_s += seconds
        return str(path)

    async def run(self, backend: LocalBackend, base_model: str) -> int:
        task, args, data_dir = self.task, self.args, backend.path
        async with backend:
            # A tracker tells runs apart by the name, and each demo is a run of its own.
            name = f"seed{args.seed}-{data_dir.name}" if args.report else f"seed{args.seed}"
            model = TrainableModel(
                name=name, report_metrics=reported_to(args.report), project=task.label, base_model=base_model,
                base_path=str(data_dir), settings=self.settings,
            )  # fmt: skip
            with self.console.status("Starting server, engine and trainer ..."):
                await model.register(backend)
            before = await self._evaluate("before", model)
            reports = await self._train(model)
            after = await self._evaluate("after", model)
            step = await model.get_step()
        picture = self.out / "learning.png"
        draw_learning_curve(picture, task, reports, before, after)
        checkpoint = data_dir / task.label / "models" / model.name / "checkpoints" / f"{step:04d}"
        summary = {
            "task": task.name, "options": task.options.model_dump(mode="json"), "seed": args.seed,
            "engine": args.engine, "games": args.games, "steps": self.num_steps, "metric": task.headline_metric,
            "before": before.mean, "after": after.mean,
            "interval_before": list(before.interval), "interval_after": list(after.interval), **self.watch.summary(),
            "checkpoint": str(checkpoint), "picture": str(picture),
        }  # fmt: skip
        self._show(before, after, summary)
        print_page_line(self.console, data_dir)
        measure, change = f"{task.headline_metric} on held-out rollouts", estimate_change(before.scores, after.scores)
        course = Course(step=step, num_steps=self.num_steps, reports=reports, measure=measure, change=change)
        report_verdict(ProgressPrinter(self.console), reach_verdict(course, Remedies()))
        if args.json:
            args.json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return EXIT_UNTRAINED if course.is_untrained else 0

    async def _evaluate(self, when: str, model: TrainableModel) -> Evaluation:
        with progress_bar(self.console, transient=True) as progress:
            bar = progress.add_task(f"held-out rollouts {when} training", total=self.args.games)
            evaluation = await evaluate(
                model, self.task, count=self.args.games, seed=EVALUATION_SEED,
                on_rollout=lambda num_ended: progress.update(bar, completed=num_ended),
            )  # fmt: skip
        await model.log(evaluation.trajectories, split="test")
        self.watch.rollout_s += evaluation.seconds
        mean, (low, high) = (f"{evaluation.mean:.3f}", "bold"), evaluation.interval
        heading = f"{self.task.headline_metric} {when}: "
        self.console.print(Text.assemble(heading, mean, f"  (95 %: {low:.3f} to {high:.3f})"))
        return evaluation

    async def _train(self, model: TrainableModel) -> list[StepReport]:
        task, num_steps, watch = self.task, self.num_steps, self.watch
        with progress_bar(self.console, "line") as progress:
            bar = progress.add_task("training", total=num_steps, line="")

            def on_step(report: StepReport) -> None:
                watch.rollout_s += report.timing.rollout_s
                watch.train_s += report.timing.train_s
                watch.publish_s += report.timing.publish_s
                line = report.line(task.headline_metric)
                progress.update(bar, completed=report.step, line=line)
                if report.step % 10 == 0 or not self.console.is_terminal:
                    progress.console.print(
                        f"step {report.step:>3}/{num_steps}  {line}", highlight=False, soft_wrap=True
                    )

            return await train_task(
                model, task, task.defaults, num_steps=num_steps, seed=self.args.seed, on_step=on_step
            )

    def _show(self, before: Evaluation, after: Evaluation, summary: dict[str, object]) -> None:
        games = Table("before training", "after training", title="One rollout of the same scenario", show_lines=True)
        shown = _telling_index(before, after)
        games.add_row(*(self.task.render_trajectory(side.trajectories[shown]) for side in (before, after)))
        self.console.print(games)
        table = Table("", "before", "after")
        heading = f"{self.task.headline_metric} on {summary['games']} held-out rollouts"
        table.add_row(heading, f"{before.mean:.3f}", Text(f"{after.mean:.3f}", style="bold"))
        intervals = [f"{low:.3f} to {high:.3f}" for low, high in (before.interval, after.interval)]
        table.add_row("95 % interval", *intervals)
        self.console.print(table)
        seconds = {key: summary[f"{key}_s"] for key in ("wall", "rollout", "train", "publish", "other")}
        self.console.print("  ".join(f"{key} {value:.1f} s" for key, value in seconds.items()), highlight=False)
        self.console.print(f"learning curve  {summary['picture']}", highlight=False, soft_wrap=True)
        self.console.print(f"checkpoint      {summary['checkpoint']}", highlight=False, soft_wrap=True)


def _telling_index(before: Evaluation, after: Evaluation) -> int:
    """Index of a scenario that failed before and succeeded after training; 0 if there is none."""
    best = max(trajectory.reward for trajectory in after.trajectories)
    pairs = enumerate(zip(before.trajectories, after.trajectories, strict=False))
    return next((i for i, (old, new) in pairs if old.reward < new.reward and new.reward >= best), 0)
