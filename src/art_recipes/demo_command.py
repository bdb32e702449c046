"""`art demo`: make a tiny model, train it by reinforcement learning, and show that it got better.

tiny model (warm start by SFT) --> evaluate --> train step by step --> evaluate --> before/after, picture, summary
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from art.cli.arguments import TASK_HELP, add_task_options
from art.cli.output import run_coroutine
from art.client.terminal import EXIT_INTERRUPTED, stopped
from art.errors import ConfigError
from art.local_backend import LocalBackend
from art.task import Task
from art_recipes.arguments import add_label_options, config_of, task_for
from art_recipes.screen import ProgressPrinter, Screen, exit_code, print_page_line
from art_recipes.seeds import add_seeds_option, draw_seeds, seeds_of, show_seeds, summarise_seeds
from art_recipes.tiny_model_command import HEAD_DIMS, build_with_progress
from art_recipes.training.pictures import plot_learning, save_picture
from art_recipes.training.recipe_config import RecipeConfig
from art_recipes.training.task_training import TaskTrainingResult, check_judge, train
from art_recipes.training.training_loop import Evaluation, headline_value


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", default="tic_tac_toe", help=f"{TASK_HELP} (default: tic_tac_toe)")
    add_task_options(parser)
    parser.add_argument("--base-model", help="hub id or local path (default: a tiny model made for the task)")
    parser.add_argument("--steps", type=int, help="training steps (default: the task's own)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the model, the scenarios and the sampling (default: 0)"
    )
    add_seeds_option(parser)
    parser.add_argument(
        "--held-out", type=int, default=400, metavar="N", help="held-out rollouts before and after (default: 400)"
    )
    parser.add_argument(
        "--engine", choices=["torch", "vllm"], default="torch",
        help="what samples: the embedded engine, or vLLM, whose environment ART_VLLM_PYTHON names (default: torch)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, help="folder for models, data and picture (default: demo/<task>-seed<seed>)"
    )
    parser.add_argument("--report", nargs="+", default=[], metavar="TRACKER", help="trackers that get metrics")
    add_label_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a summary that scripts can read")


def run(args: argparse.Namespace) -> int:
    console, config = Screen(), config_of(RecipeConfig, args)
    if args.held_out < 1:
        raise ConfigError(f"`--held-out` must be 1 or more, got {args.held_out}")
    task = task_for(console, args, args.base_model, warns=False)  # the recipe warns
    check_judge(task, None)
    seeds = seeds_of(args, args.seed)
    label = f"seed{args.seed}" if len(seeds) == 1 else f"seeds{seeds[0]}-{seeds[-1]}"
    out = (args.out or Path("demo") / f"{task.label}-{label}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    # A new folder each time: the demo shows one complete training and continues no older one.
    data_dir = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    picture = out / "learning.png"
    results: dict[int, TaskTrainingResult] = {}
    summaries: dict[int, dict[str, Any]] = {}
    for seed in seeds:
        started = time.perf_counter()
        model = out / ("model" if len(seeds) == 1 else f"model-seed{seed}")
        try:
            result = results[seed] = _train(console, args, config, task, seed, model, data_dir)
        except KeyboardInterrupt:
            where = stopped()  # without a step as long as the model is not registered, e.g. in the warm start
            kept = " before the training began" if where == "stopped" else f"; every finished step is kept in {out}"
            console.print(f"\n{where}{kept}", highlight=False, soft_wrap=True)
            return EXIT_INTERRUPTED
        checkpoint = data_dir / task.label / "models" / result.model.name / "checkpoints" / f"{result.step:04d}"
        before, after = result.before, result.after
        assert before is not None
        assert after is not None
        if len(seeds) == 1:
            draw_demo(picture, task, result, before, after)
            show_gain(console, task, before, after)
        summaries[seed] = {
            "task": task.name, "options": task.options.model_dump(mode="json"), "seed": seed,
            "engine": args.engine, "held_out": args.held_out, "steps": _num_steps(args, task),
            "metric": task.headline_metric, "before": before.mean, "after": after.mean,
            "interval_before": list(before.interval), "interval_after": list(after.interval),
            "wall_s": time.perf_counter() - started, "checkpoint": str(checkpoint), "picture": str(picture),
        }  # fmt: skip
    if len(seeds) > 1:
        draw_seeds(picture, task, results)
        show_seeds(console, task.headline_metric, results)
    console.print(f"learning curve  {picture}", highlight=False, soft_wrap=True)
    for summary in summaries.values():
        console.print(f"checkpoint      {summary['checkpoint']}", highlight=False, soft_wrap=True)
    print_page_line(console, data_dir)
    if args.json:
        whole = summaries[seeds[0]] if len(seeds) == 1 else summarise_seeds(task.headline_metric, summaries, results)
        args.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return max(map(exit_code, results.values()))


def _num_steps(args: argparse.Namespace, task: Task) -> int:
    return task.defaults.num_steps if args.steps is None else int(args.steps)


def _train(
    console: Console, args: argparse.Namespace, config: RecipeConfig, task: Task, seed: int, path: Path, data_dir: Path
) -> TaskTrainingResult:
    """Train with one seed, from a tiny model that is made at `path` unless there is a base model."""
    detail = f": {task.description} (seed {seed}, {_num_steps(args, task)} steps)"
    console.print(Text.assemble(("ART demo", "bold"), detail))
    with LocalBackend(path=data_dir) as backend, ProgressPrinter(console) as printer:
        if args.base_model is None:
            backend.start()  # it comes up while the tiny model is made
            build_with_progress(console, path, task=task, seed=seed, head_dim=HEAD_DIMS.get(args.engine, 16))
        settings = config.model_dump(exclude_unset=True) | {
            "base_model": args.base_model or str(path), "seed": seed,
            "steps": _num_steps(args, task), "held_out": args.held_out, "data_dir": data_dir, "max_staleness": 0,
            # A tracker tells runs apart by the name, and each demo is a run of its own.
            "name": f"seed{seed}-{data_dir.name}" if args.report else f"seed{seed}",
        }  # fmt: skip
        return run_coroutine(train(task, backend=backend, on_progress=printer, **settings))


def show_gain(console: Console, task: Task, before: Evaluation, after: Evaluation) -> None:
    """Print two rollouts of one scenario."""
    games = Table("before training", "after training", title="One rollout of the same scenario", show_lines=True)
    # A scenario that failed before and succeeded after training tells most.
    best = max(trajectory.reward for trajectory in after.trajectories)
    pairs = list(zip(before.trajectories, after.trajectories, strict=False))
    shown = next((pair for pair in pairs if pair[0].reward < pair[1].reward and pair[1].reward >= best), pairs[0])
    games.add_row(*map(task.render_trajectory, shown))
    console.print(games)


def draw_demo(path: Path, task: Task, result: TaskTrainingResult, before: Evaluation, after: Evaluation) -> None:
    """Draw the headline metric by training step, with a running mean, and both evaluations with their intervals."""
    points = {report.step: report.headline for report in result.reports}
    held_out = {
        step: [headline_value(task, trajectory) for trajectory in evaluation.trajectories]
        for step, evaluation in ((0, before), (max(points, default=0), after))
    }
    words = {"measure": task.headline_metric, "title": task.description}
    save_picture(path, lambda axes: plot_learning(axes, points, held_out=held_out, **words))
