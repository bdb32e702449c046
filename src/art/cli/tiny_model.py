"""`art tiny-model PATH`: make a tiny model with its tokenizer, warm-started for a task."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art.cli.arguments import TASK_HELP, add_task_options, task_for
from art.storage.local_key import state_folder
from art.storage.portable import is_running
from art.task import Task, draw_conversations

if TYPE_CHECKING:
    from rich.console import Console


def add_options(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    from art.cli.screen import Screen  # not at the top: `art status` runs without the extra `local`

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
    from art.cli.screen import SILENCE_S, progress_bar
    from art.report.page import duration

    draw_conversations(task, seed=seed, count=1, skill=options.get("play_skill"))
    started = time.perf_counter()
    if not console.is_terminal:  # a bar shows nothing there until it is done
        about = "a warm start of about a minute on an idle core"
        console.print(f"making a tiny model in {path}: {about}", highlight=False, soft_wrap=True)
    with _noted(path.resolve()) as note, progress_bar(console, "loss") as progress:
        bar = progress.add_task("warm start", total=None, loss="")

        from art.runtime.children.child import import_transformers

        import_transformers()
        from art.testing.tiny.build import build_tiny_model

        began = said_at = time.perf_counter()

        def on_progress(done: int, total: int, loss: float) -> None:
            nonlocal said_at
            note(f"step {done} of {total}")
            progress.update(bar, completed=done, total=total, loss=f"loss {loss:.3f}")
            now = time.perf_counter()
            if not console.is_terminal and (now - said_at >= SILENCE_S or done == total):
                said_at, left_s = now, (now - began) / done * (total - done)
                line = f"warm start, step {done}/{total}  loss {loss:.3f}  {duration(left_s)} left"
                console.print(line, highlight=False, soft_wrap=True)

        build_tiny_model(path, task=task, seed=seed, head_dim=head_dim, on_progress=on_progress, **options)
    return path, time.perf_counter() - started


@contextlib.contextmanager
def _noted(path: Path) -> Iterator[Callable[[str], None]]:
    """Keep a note of how far a warm start is, for `warm_starts`. Without a home directory there is no note."""
    file = state_folder() / f"warm-start-{os.getpid()}.txt"

    def write(progress: str) -> None:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{path}: {progress}", encoding="utf-8")

    write("starting")
    try:
        yield write
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def warm_starts() -> list[str]:
    """The warm starts of tiny models that this user's commands run now, each with its folder and progress."""
    lines = []
    for file in sorted(state_folder().glob("warm-start-*.txt")):
        with contextlib.suppress(OSError):  # the file has gone
            if is_running(int(file.stem.rpartition("-")[2])):
                lines.append(file.read_text(encoding="utf-8"))
    return lines
