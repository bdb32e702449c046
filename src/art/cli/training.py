"""`art demo`, `art train` and `art tiny-model`: what trains on this machine. They need the extra `local`."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from art.cli.arguments import TASK_HELP, add_recipe_options, add_task_options, config_of, task_for
from art.cli.output import run_coroutine
from art.cli.screen import SILENCE_S, ProgressPrinter, Screen, exit_code, print_page_line, progress_bar
from art.client.terminal import EXIT_INTERRUPTED, stopped
from art.errors import ConfigError
from art.local_backend import LocalBackend
from art.recipes.pictures import plot_learning
from art.recipes.recipe_config import RecipeConfig
from art.recipes.task_training import TaskTrainingConfig, TaskTrainingResult, check_judge, train
from art.recipes.training_loop import Evaluation, duration, headline_value
from art.task import Task, draw_conversations

HEAD_DIMS = {"vllm": 32}
"""Size of the heads of a tiny model by engine, if it is not 16: vLLM on CPU has no attention for smaller ones."""


def add_demo_options(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--report", nargs="+", default=[], metavar="TRACKER", help="trackers that get metrics")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a summary that scripts can read")


def run_demo(args: argparse.Namespace) -> int:
    """`art demo`: make a tiny model, train it by reinforcement learning, and show that it got better.

    tiny model (warm start by SFT) --> evaluate --> train step by step --> evaluate --> before/after, picture, summary
    """
    started = time.perf_counter()
    console, config = Screen(), config_of(RecipeConfig, args)
    if args.games < 1:
        raise ConfigError(f"`--games` must be 1 or more, got {args.games}")
    task = task_for(console, args, args.base_model, warns=False)  # the recipe warns
    check_judge(task, None)
    out = (args.out or Path("demo") / f"{task.label}-seed{args.seed}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    # A new folder each time: the demo shows one complete training and continues no older one.
    data_dir = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    num_steps = task.defaults.num_steps if args.steps is None else args.steps
    detail = f": {task.description} (seed {args.seed}, {num_steps} steps)"
    console.print(Text.assemble(("ART demo", "bold"), detail))
    try:
        with LocalBackend(path=data_dir) as backend, ProgressPrinter(console) as printer:
            if args.base_model is None:
                backend.start()  # it comes up while the tiny model is made
                head_dim = HEAD_DIMS.get(args.engine, 16)
                build_with_progress(console, out / "model", task=task, seed=args.seed, head_dim=head_dim)
            settings = config.model_dump(exclude_unset=True) | {
                "base_model": args.base_model or str(out / "model"),
                "steps": num_steps, "evaluate": args.games, "data_dir": data_dir, "max_staleness": 0,
                # A tracker tells runs apart by the name, and each demo is a run of its own.
                "name": f"seed{args.seed}-{data_dir.name}" if args.report else f"seed{args.seed}",
            }  # fmt: skip
            result = run_coroutine(train(task, backend=backend, on_progress=printer, **settings))
    except KeyboardInterrupt:
        where = stopped()  # without a step as long as the model is not registered, e.g. in the warm start
        kept = " before the training began" if where == "stopped" else f"; every finished step is kept in {out}"
        console.print(f"\n{where}{kept}", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    before, after = result.before, result.after
    assert before is not None
    assert after is not None
    picture = out / "learning.png"
    draw_demo(picture, task, result, before, after)
    checkpoint = data_dir / task.label / "models" / result.model.name / "checkpoints" / f"{result.step:04d}"
    show_gain(console, task, before, after)
    console.print(f"learning curve  {picture}", highlight=False, soft_wrap=True)
    console.print(f"checkpoint      {checkpoint}", highlight=False, soft_wrap=True)
    print_page_line(console, data_dir)
    if args.json:
        summary = {
            "task": task.name, "options": task.options.model_dump(mode="json"), "seed": args.seed,
            "engine": args.engine, "games": args.games, "steps": num_steps, "metric": task.headline_metric,
            "before": before.mean, "after": after.mean,
            "interval_before": list(before.interval), "interval_after": list(after.interval),
            "wall_s": time.perf_counter() - started, "checkpoint": str(checkpoint), "picture": str(picture),
        }  # fmt: skip
        args.json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return exit_code(result)


def show_gain(console: Console, task: Task, before: Evaluation, after: Evaluation) -> None:
    """Print two rollouts of one scenario, and both evaluations."""
    games = Table("before training", "after training", title="One rollout of the same scenario", show_lines=True)
    # A scenario that failed before and succeeded after training tells most.
    best = max(trajectory.reward for trajectory in after.trajectories)
    pairs = list(zip(before.trajectories, after.trajectories, strict=False))
    shown = next((pair for pair in pairs if pair[0].reward < pair[1].reward and pair[1].reward >= best), pairs[0])
    games.add_row(*map(task.render_trajectory, shown))
    console.print(games)
    table = Table("", "before", "after")
    heading = f"{task.headline_metric} on {len(after.trajectories)} held-out rollouts"
    table.add_row(heading, f"{before.mean:.3f}", Text(f"{after.mean:.3f}", style="bold"))
    table.add_row("95 % interval", *(f"{low:.3f} to {high:.3f}" for low, high in (before.interval, after.interval)))
    console.print(table)


def draw_demo(path: Path, task: Task, result: TaskTrainingResult, before: Evaluation, after: Evaluation) -> None:
    """Draw the headline metric by training step, with a running mean, and both evaluations with their intervals."""
    from matplotlib.figure import Figure

    points = {report.step: report.headline for report in result.reports}
    held_out = {
        step: [headline_value(task, trajectory) for trajectory in evaluation.trajectories]
        for step, evaluation in ((0, before), (max(points, default=0), after))
    }
    figure = Figure(figsize=(8, 4.5), dpi=150)
    plot_learning(figure.subplots(), points, held_out=held_out, measure=task.headline_metric, title=task.description)
    figure.tight_layout()
    figure.savefig(path)


# -- train --


def add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help=TASK_HELP)
    add_task_options(parser)
    parser.add_argument("--base-model", help="hub id or local path (default: a tiny model made for the task)")
    parser.add_argument(
        "--tiny-context", type=int, metavar="N", help="context of the tiny model (default: the task's own)"
    )
    judged = "a language model scores the rollouts of each scenario, in place of the task's own reward"
    add_recipe_options(parser, TaskTrainingConfig, judged)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a summary that scripts can read")


def run_train(args: argparse.Namespace) -> int:
    """`art train TASK`: train a task's agent on any base model. The same command continues where the last one stopped.

        art train tic_tac_toe --evaluate 400

    `art tasks` lists the tasks, and `art tasks NAME` shows one with its options.
    """
    started = time.perf_counter()
    console, config = Screen(), config_of(TaskTrainingConfig, args)
    base_model = config.base_model
    task = task_for(console, args, base_model, warns=False)  # the recipe warns
    check_judge(task, config.judge)
    config.check(task.defaults)
    if base_model is None:
        tiny = {"seed": config.seed, "head_dim": HEAD_DIMS.get(config.engine, 16), "context": args.tiny_context}
        path = default_folder(config.data_dir.resolve(), task, **tiny)
        if not (path / "model.safetensors").exists():
            build_with_progress(console, path, task=task, **tiny)
        base_model = str(path)
    try:
        with ProgressPrinter(console) as printer:
            result = run_coroutine(train(task, base_model, config=config, on_progress=printer))
    except KeyboardInterrupt:
        console.print(f"\n{stopped()}; run the same command again and it goes on", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    folder = config.data_dir / result.model.project / "models" / result.model.name
    console.print(f"checkpoint  {folder / 'checkpoints' / f'{result.step:04d}'}", highlight=False, soft_wrap=True)
    console.print(f"metrics     {folder / 'history.jsonl'}", highlight=False, soft_wrap=True)
    console.print(f"rollouts    {folder / 'trajectories'}", highlight=False, soft_wrap=True)
    print_page_line(console, config.data_dir.resolve())
    if args.json:
        summary: dict[str, object] = {
            "task": task.name, "options": task.options.model_dump(mode="json"), "metric": task.headline_metric,
            "seed": config.seed, "stopped": "budget" if result.is_over_budget else None,
        }  # fmt: skip
        for name, evaluation in (("", result.after), ("_before", result.before)):
            if evaluation is not None:
                summary |= {f"evaluation{name}": evaluation.mean, f"interval{name}": list(evaluation.interval)}
        summary |= {
            "step": result.step, "rewards": [report.reward for report in result.reports],
            "headlines": [report.headline for report in result.reports], "costs": result.model.costs.summary(),
            "wall_s": time.perf_counter() - started,
        }  # fmt: skip
        args.json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return exit_code(result)


# -- tiny models --


def add_tiny_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="folder to write")
    parser.add_argument("--task", default="tic_tac_toe", help=f"{TASK_HELP} (default: tic_tac_toe)")
    add_task_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the synthetic play (default: 0)")
    parser.add_argument(
        "--play-skill", type=float, metavar="S", help="mean skill of the play, 0 to 1 (default: the task's own)"
    )
    parser.add_argument(
        "--warm-start-steps", type=int, metavar="N", help="0 leaves the weights random (default: the task's own number)"
    )
    parser.add_argument(
        "--head-dim", type=int, default=16, choices=[16, 32], help="of the attention; vLLM needs 32 (default: 16)"
    )
    parser.add_argument(
        "--context", type=int, metavar="N",
        help="tokens of a prompt and its answer together (default: the task's own, 1024 for most). A server serves at "
        "most 32768 of them, unless `max_context` of the engine's settings says more",
    )  # fmt: skip


def run_tiny_model(args: argparse.Namespace) -> int:
    """`art tiny-model PATH`: make a tiny model with its tokenizer, warm-started for a task."""
    console = Screen()
    task = task_for(console, args, None)
    path, seconds = build_with_progress(
        console, args.path, task=task, seed=args.seed, play_skill=args.play_skill,
        warm_start_steps=args.warm_start_steps, head_dim=args.head_dim, context=args.context,
    )  # fmt: skip
    console.print(f"tiny model in {path} ({seconds:.1f} s)", highlight=False, soft_wrap=True)
    return 0


def default_folder(data_dir: Path, task: Task, *, seed: int, head_dim: int, context: int | None = None) -> Path:
    """The folder for the tiny model of a task and seed. Another warm start (play or settings) has another folder."""
    play = draw_conversations(task, seed=seed, count=20)
    defaults = task.defaults if context is None else dataclasses.replace(task.defaults, tiny_context=context)
    digest = hashlib.blake2b(repr((defaults, head_dim, play)).encode(), digest_size=4).hexdigest()
    return data_dir / "tiny-models" / f"{task.label}-seed{seed}-{digest}"


def build_with_progress(
    console: Console, path: Path, *, task: Task, seed: int, head_dim: int = 16, **options: Any
) -> tuple[Path, float]:
    """Make a tiny model for a task, and show a progress bar of its warm start (supervised training on scripted play).

    Args:
        options: more arguments of `build_tiny_model`.

    Returns:
        The path, and the seconds that it took, imports included.

    Raises:
        ConfigError: the task has no play to learn from. This is checked before anything heavy is imported.
    """
    draw_conversations(task, seed=seed, count=1, skill=options.get("play_skill"))
    started = time.perf_counter()
    if not console.is_terminal:  # a bar shows nothing there until it is done
        about = "a warm start of about a minute on an idle core"
        console.print(f"making a tiny model in {path}: {about}", highlight=False, soft_wrap=True)
    with progress_bar(console, "loss") as progress:
        bar = progress.add_task("warm start", total=None, loss="")

        from art.worker.child import import_transformers

        import_transformers()
        from art.testing.tiny_model import build_tiny_model

        began = said_at = time.perf_counter()

        def on_progress(done: int, total: int, loss: float) -> None:
            nonlocal said_at
            progress.update(bar, completed=done, total=total, loss=f"loss {loss:.3f}")
            now = time.perf_counter()
            if not console.is_terminal and (now - said_at >= SILENCE_S or done == total):
                said_at, left_s = now, (now - began) / done * (total - done)
                line = f"warm start, step {done}/{total}  loss {loss:.3f}  {duration(left_s)} left"
                console.print(line, highlight=False, soft_wrap=True)

        build_tiny_model(path, task=task, seed=seed, head_dim=head_dim, on_progress=on_progress, **options)
    return path, time.perf_counter() - started
