"""`art train TASK`: train a task's agent on any base model. The same command continues where the last one stopped.

    art train tic_tac_toe --held-out 400

`art tasks` lists the tasks, and `art tasks NAME` shows one with its options.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from art.cli.arguments import TASK_HELP, add_task_options
from art.cli.output import run_coroutine
from art.client.terminal import EXIT_INTERRUPTED, stopped
from art.task import Task
from art_recipes.arguments import add_recipe_options, add_settings, config_of, task_for
from art_recipes.screen import ProgressPrinter, Screen, exit_code, print_page_line
from art_recipes.seeds import add_seeds_option, seeds_of, show_seeds, summarise_seeds
from art_recipes.tiny_model_command import HEAD_DIMS, build_with_progress, default_folder
from art_recipes.training.task_training import TaskTrainingConfig, TaskTrainingResult, check_judge, train


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help=TASK_HELP)
    add_task_options(parser)
    parser.add_argument(
        "--agent", action="append", dest="task_options", type=lambda name: ("agent", name), metavar="AGENT",
        help="coding agent that does a task of harbor:DIR as it is, e.g. claude-code: short for -o agent=AGENT",
    )  # fmt: skip
    parser.add_argument("--base-model", help="hub id or local path (default: a tiny model made for the task)")
    judged = "a language model scores the rollouts of each scenario, in place of the task's own reward"
    add_settings(parser, TaskTrainingConfig, "held_out")
    add_recipe_options(parser, TaskTrainingConfig, judged)
    add_seeds_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a summary that scripts can read")


def run(args: argparse.Namespace) -> int:
    console, config = Screen(), config_of(TaskTrainingConfig, args)
    task = task_for(console, args, config.base_model, warns=False)  # the recipe warns
    check_judge(task, config.judge)
    config.check(task.defaults)
    seeds = seeds_of(args, config.seed)
    results: dict[int, TaskTrainingResult] = {}
    summaries: dict[int, dict[str, Any]] = {}
    for seed in seeds:
        started = time.perf_counter()
        name = None if config.name is None else f"{config.name}-seed{seed}"
        one = config if len(seeds) == 1 else config.model_copy(update={"seed": seed, "name": name})
        try:
            results[seed] = _train(console, task, one)
        except KeyboardInterrupt:
            console.print(f"\n{stopped()}; run the same command again and it goes on", highlight=False, soft_wrap=True)
            return EXIT_INTERRUPTED
        summaries[seed] = _summary(task, one, results[seed]) | {"wall_s": time.perf_counter() - started}
    if len(seeds) > 1:
        show_seeds(console, task.headline_metric, results)
    print_page_line(console, config.data_dir.resolve())
    if args.json:
        whole = summaries[seeds[0]] if len(seeds) == 1 else summarise_seeds(task.headline_metric, summaries, results)
        args.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return max(map(exit_code, results.values()))


def _train(console: Console, task: Task, config: TaskTrainingConfig) -> TaskTrainingResult:
    """Train with one seed, from a tiny model that is made for it unless there is a base model."""
    base_model = config.base_model
    if base_model is None:
        tiny = {"seed": config.seed, "head_dim": HEAD_DIMS.get(config.model_settings().engine.kind, 16)}
        path = default_folder(config.data_dir.resolve(), task, **tiny)
        if not (path / "model.safetensors").exists():
            build_with_progress(console, path, task=task, **tiny)
        base_model = str(path)
    with ProgressPrinter(console) as printer:
        result = run_coroutine(train(task, base_model, config=config, on_progress=printer))
    folder = config.data_dir / result.model.project / "models" / result.model.name
    console.print(f"checkpoint  {folder / 'checkpoints' / f'{result.step:04d}'}", highlight=False, soft_wrap=True)
    console.print(f"metrics     {folder / 'history.jsonl'}", highlight=False, soft_wrap=True)
    console.print(f"rollouts    {folder / 'trajectories'}", highlight=False, soft_wrap=True)
    return result


def _summary(task: Task, config: TaskTrainingConfig, result: TaskTrainingResult) -> dict[str, Any]:
    """Return what `--json` writes for one seed."""
    summary: dict[str, Any] = {
        "task": task.name, "options": task.options.model_dump(mode="json"), "metric": task.headline_metric,
        "seed": config.seed, "stopped": "budget" if result.is_over_budget else None,
    }  # fmt: skip
    for name, evaluation in (("", result.after), ("_before", result.before)):
        if evaluation is not None:
            summary |= {f"evaluation{name}": evaluation.mean, f"interval{name}": list(evaluation.interval)}
    return summary | {
        "step": result.step, "rewards": [report.reward for report in result.reports],
        "headlines": [report.headline for report in result.reports], "costs": result.model.costs.summary(),
    }  # fmt: skip
