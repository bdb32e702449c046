"""`art tiny-model PATH`: make a tiny model with its tokenizer, warm-started for a task."""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from art.cli.arguments import TASK_HELP, add_task_options
from art.client.terminal import ProgressLine
from art.task import Task, draw_conversations
from art_recipes.arguments import task_for
from art_recipes.screen import Screen

HEAD_DIMS = {"vllm": 32}
"""Size of the heads of a tiny model by engine, if it is not 16: vLLM on CPU has no attention for smaller ones."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="folder to write")
    parser.add_argument("--task", default="tic_tac_toe", help=f"{TASK_HELP} (default: tic_tac_toe)")
    add_task_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the synthetic play (default: 0)")
    parser.add_argument(
        "--play-skill", type=float, metavar="S", help="mean skill of the play, 0 to 1 (default: the task's own)"
    )
    parser.add_argument(
        "--warm-start-steps", type=int, metavar="N", help="0 leaves the weights random (default: the task's own number)"
    )
    parser.add_argument(
        "--head-dim", type=int, default=16, choices=[16, 32], help="size of a head; vLLM needs 32 (default: 16)"
    )
    parser.add_argument(
        "--context", type=int, metavar="N",
        help="tokens of a prompt and its answer together (default: the task's own, 1024 for most). A server serves at "
        "most 32768 of them, unless `max_context` of the engine's settings says more",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    console = Screen()
    task = task_for(console, args, None)
    path, seconds = build_with_progress(
        console, args.path, task=task, seed=args.seed, play_skill=args.play_skill,
        warm_start_steps=args.warm_start_steps, head_dim=args.head_dim, context=args.context,
    )  # fmt: skip
    console.print(f"tiny model in {path} ({seconds:.1f} s)", highlight=False, soft_wrap=True)
    return 0


def default_folder(data_dir: Path, task: Task, *, seed: int, head_dim: int) -> Path:
    """The folder for the tiny model of a task and seed. Another warm start (play or settings) has another folder."""
    play = draw_conversations(task, seed=seed, count=20)
    digest = hashlib.blake2b(repr((task.defaults, head_dim, play)).encode(), digest_size=4).hexdigest()
    return data_dir / "tiny-models" / f"{task.label}-seed{seed}-{digest}"


def build_with_progress(
    console: Console, path: Path, *, task: Task, seed: int, head_dim: int = 16, **options: Any
) -> tuple[Path, float]:
    """Make a tiny model for a task, and show the progress of its warm start (supervised training on scripted play).

    Args:
        options: more arguments of `build_tiny_model`.

    Returns:
        The path, and the seconds that it took, imports included.

    Raises:
        ConfigError: the task has no play to learn from. This is checked before anything heavy is imported.
    """
    draw_conversations(task, seed=seed, count=1, skill=options.get("play_skill"))
    started = time.perf_counter()
    about = "a warm start of about a minute on an idle core"
    console.print(f"making a tiny model in {path}: {about}", highlight=False, soft_wrap=True)
    with ProgressLine("warm start") as line:
        from art.worker.child import import_transformers

        import_transformers()
        from art.testing.tiny_model import build_tiny_model

        def on_progress(done: int, total: int, loss: float) -> None:
            if done == 1:
                line.begin("warm start", done, total)  # its first step begins to count after the imports
            line.update(done, total, f"loss {loss:.3f}")

        build_tiny_model(path, task=task, seed=seed, head_dim=head_dim, on_progress=on_progress, **options)
    return path, time.perf_counter() - started
