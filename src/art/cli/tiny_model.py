"""`art tiny-model PATH`: make a tiny model with its tokenizer, warm-started for a task."""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from art.cli.terminal.screen import Screen, progress_bar
from art.runtime.children.child import import_transformers
from art.task import Task, draw_conversations, get_task


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "tiny-model", help="make a tiny model with its tokenizer, warm-started for a task", description=__doc__
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="folder to write")
    parser.add_argument(
        "--task", default="tic_tac_toe", help="task name, or module:attribute of your own Task (default: tic_tac_toe)"
    )
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    console, task = Screen(), get_task(args.task)
    path, seconds = build_with_progress(
        console, args.path, task=task, seed=args.seed, play_skill=args.play_skill,
        warm_start_steps=args.warm_start_steps, head_dim=args.head_dim,
    )  # fmt: skip
    console.print(f"tiny model in {path} ({seconds:.1f} s)", highlight=False, soft_wrap=True)
    return 0


def default_folder(data_dir: Path, task: Task, *, seed: int, head_dim: int) -> Path:
    """Folder of the tiny model of a task and seed. It depends on the task's play and settings too."""
    play = draw_conversations(task, seed=seed, count=20)
    digest = hashlib.blake2b(repr((task.defaults, head_dim, play)).encode(), digest_size=4).hexdigest()
    return data_dir / "tiny-models" / f"{task.name}-seed{seed}-{digest}"


def build_with_progress(
    console: Console, path: Path, *, task: Task, seed: int, head_dim: int = 16, **options: Any
) -> tuple[Path, float]:
    """Build a tiny model with a progress bar.

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
        console.print(f"making a tiny model in {path}: a warm start of about a minute", highlight=False, soft_wrap=True)
    with progress_bar(console, "loss") as progress:
        bar = progress.add_task("warm start", total=None, loss="")

        import_transformers()
        from art.testing.tiny.build import build_tiny_model

        def on_progress(done: int, total: int, loss: float) -> None:
            progress.update(bar, completed=done, total=total, loss=f"loss {loss:.3f}")

        build_tiny_model(path, task=task, seed=seed, head_dim=head_dim, on_progress=on_progress, **options)
    return path, time.perf_counter() - started
