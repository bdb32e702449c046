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
from art.cli.terminal.event_loop import run_coroutine
from art.cli.terminal.picture import draw_learning_curve
from art.cli.terminal.progress_printer import EXIT_UNTRAINED, ProgressPrinter
from art.cli.terminal.screen import Screen, progress_bar
from art.cli.tiny_model import build_with_progress
from art.client.interrupt import EXIT_INTERRUPTED, stopped
from art.config import EngineConfig, ModelSettings, VllmConfig
from art.errors import TrainingError
from art.model import TrainableModel
from art.recipes.progress import report_verdict
from art.recipes.training_loop import Evaluation, StepReport, evaluate, train_task
from art.recipes.verdict import Course, Remedies, change_of, reach_verdict
from art.task import Task, get_task

EVALUATION_SEED = 20_000
"""Seed of the held-out scenarios, which is the same for every training seed so that seeds can be compared."""


@dataclass(slots=True, kw_only=True)
class Stopwatch:
    """Wall time since the start, and its parts for rollouts, training and publishing, in seconds.

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
        known = self.rollout_s + self.train_s + self.publish_s
        return {
            "wall_s": wall_s,
            "rollout_s": self.rollout_s,
            "train_s": self.train_s,
            "publish_s": self.publish_s,
            "other_s": wall_s - known,
            "warm_start_s": self.warm_start_s,
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--task", default="tic_tac_toe", help="task name, or module:attribute of your own Task (default: tic_tac_toe)"
    )
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a summary that scripts can read")


def run(args: argparse.Namespace) -> int:
    console = Screen()
    task = get_task(args.task)
    out = (args.out or Path("demo") / f"{task.name}-seed{args.seed}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        base_model, watch = _start(console, task, args, out)
        return run_coroutine(_demo(console, task, args, out, base_model, watch))
    except KeyboardInterrupt:
        console.print(f"\n{stopped()}; every finished step is kept in {out}", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    except TrainingError as error:
        console.print(str(error), style="red")
        return 1


def _start(console: Console, task: Task, args: argparse.Namespace, out: Path) -> tuple[str, Stopwatch]:
    """The base model, which is built if none is given. In a coroutine Ctrl-C would not end the warm start."""
    watch = Stopwatch(started=time.perf_counter())
    detail = f": {task.description} (seed {args.seed}, {_num_steps(task, args)} steps)"
    console.print(Text.assemble(("ART demo", "bold"), detail))
    if args.base_model is not None:
        return args.base_model, watch
    path, watch.warm_start_s = build_with_progress(
        console, out / "model", task=task, seed=args.seed, head_dim=32 if args.engine == "vllm" else 16
    )
    watch.train_s += watch.warm_start_s
    return str(path), watch


def _num_steps(task: Task, args: argparse.Namespace) -> int:
    return args.steps if args.steps is not None else task.defaults.num_steps


async def _demo(
    console: Console, task: Task, args: argparse.Namespace, out: Path, base_model: str, watch: Stopwatch
) -> int:
    num_steps = _num_steps(task, args)
    # A new folder each time: the demo shows one complete training and does not continue an older one.
    data_dir = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    async with LocalBackend(path=data_dir) as backend:
        settings = ModelSettings(engine=VllmConfig() if args.engine == "vllm" else EngineConfig())
        model = TrainableModel(
            name=f"seed{args.seed}", project=task.name, base_model=base_model, base_path=str(data_dir),
            settings=settings,
        )  # fmt: skip
        with console.status("Starting server, engine and trainer ..."):
            await model.register(backend)
        before = await _evaluate(console, "before", model, task, args, watch)
        reports = await _train(console, model, task, num_steps, args.seed, watch)
        after = await _evaluate(console, "after", model, task, args, watch)
        step = await model.get_step()
    picture = out / "learning.png"
    draw_learning_curve(picture, task, reports, before, after)
    checkpoint = data_dir / task.name / "models" / model.name / "checkpoints" / f"{step:04d}"
    summary = {
        "task": task.name,
        "seed": args.seed,
        "engine": args.engine,
        "games": args.games,
        "steps": num_steps,
        "metric": task.headline_metric,
        "before": before.mean,
        "after": after.mean,
        "interval_before": list(before.interval),
        "interval_after": list(after.interval),
        **watch.summary(),
        "checkpoint": str(checkpoint),
        "picture": str(picture),
    }
    _show_result(console, task, before, after, summary)
    measure, change = f"{task.headline_metric} on held-out rollouts", change_of(before, after)
    course = Course(step=step, num_steps=num_steps, reports=reports, measure=measure, change=change)
    report_verdict(ProgressPrinter(console), reach_verdict(course, Remedies()))
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return EXIT_UNTRAINED if course.is_untrained else 0


async def _evaluate(
    console: Console, when: str, model: TrainableModel, task: Task, args: argparse.Namespace, watch: Stopwatch
) -> Evaluation:
    with console.status(f"Playing {args.games} held-out rollouts {when} training ..."):
        evaluation = await evaluate(model, task, count=args.games, seed=EVALUATION_SEED)
    watch.rollout_s += evaluation.seconds
    low, high = evaluation.interval
    mean = f"{evaluation.mean:.3f}", "bold"
    console.print(Text.assemble(f"{task.headline_metric} {when}: ", mean, f"  (95 %: {low:.3f} to {high:.3f})"))
    return evaluation


async def _train(
    console: Console, model: TrainableModel, task: Task, num_steps: int, seed: int, watch: Stopwatch
) -> list[StepReport]:
    with progress_bar(console, "line") as progress:
        bar = progress.add_task("training", total=num_steps, line="")

        def on_step(report: StepReport) -> None:
            watch.rollout_s += report.timing.rollout_s
            watch.train_s += report.timing.train_s
            watch.publish_s += report.timing.publish_s
            line = report.line(task.headline_metric)
            progress.update(bar, completed=report.step, line=line)
            if report.step % 10 == 0 or not console.is_terminal:
                progress.console.print(f"step {report.step:>3}  {line}", highlight=False, soft_wrap=True)

        return await train_task(model, task, task.defaults, num_steps=num_steps, seed=seed, on_step=on_step)


def _show_result(
    console: Console, task: Task, before: Evaluation, after: Evaluation, summary: dict[str, object]
) -> None:
    games = Table(title="One rollout of the same scenario", show_lines=True)
    games.add_column("before training")
    games.add_column("after training")
    first, second = _telling_pair(task, before, after)
    games.add_row(
        task.render_trajectory(before.trajectories[first]), task.render_trajectory(after.trajectories[second])
    )
    console.print(games)
    table = Table()
    for heading in ("", "before", "after"):
        table.add_column(heading)
    table.add_row(
        f"{task.headline_metric} on {summary['games']} held-out rollouts",
        f"{before.mean:.3f}",
        Text(f"{after.mean:.3f}", style="bold"),
    )
    table.add_row(
        "95 % interval", *(f"{low:.3f} to {high:.3f}" for low, high in (before.interval, after.interval))
    )  # fmt: skip
    console.print(table)
    seconds = {key: summary[f"{key}_s"] for key in ("wall", "rollout", "train", "publish", "other")}
    console.print("  ".join(f"{key} {value:.1f} s" for key, value in seconds.items()), highlight=False)
    console.print(f"learning curve  {summary['picture']}", highlight=False, soft_wrap=True)
    console.print(f"checkpoint      {summary['checkpoint']}", highlight=False, soft_wrap=True)


def _telling_pair(task: Task, before: Evaluation, after: Evaluation) -> tuple[int, int]:
    """Indices of a scenario that failed before and succeeded after training; of the first one if there is none."""
    for i, (old, new) in enumerate(zip(before.trajectories, after.trajectories, strict=False)):
        if old.reward < new.reward and new.reward >= max(t.reward for t in after.trajectories):
            return i, i
    return 0, 0
