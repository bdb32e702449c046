"""Table, verdict and picture of one training with several seeds: the option `--seeds` of `art demo` and `art train`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from art.errors import ConfigError
from art.task import Task
from art_recipes.screen import COLOURS
from art_recipes.training.pictures import plot_seeds, save_picture
from art_recipes.training.progress import RunVerdict
from art_recipes.training.task_training import TaskTrainingResult

Results = Mapping[int, TaskTrainingResult]
"""Results of the same training by seed."""
_WORDS = {"good": "it learnt", "soft": "no clear change", "bad": "it got worse"}


def add_seeds_option(parser: argparse.ArgumentParser) -> None:
    about = "train with N seeds, from that of --seed on, and judge them together (default: 1)"
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help=about)


def seeds_of(args: argparse.Namespace, first: int) -> range:
    """Return the seeds to train with. Raises `ConfigError` if their number is below 1."""
    if args.seeds < 1:
        raise ConfigError(f"`--seeds` must be 1 or more, got {args.seeds}")
    return range(first, first + args.seeds)


def judge_seeds(metric: str, results: Results) -> RunVerdict:
    """Judge all runs together. They learnt if each of them did: no claim is stronger than the worst seed."""
    changes = [result.change.mean for result in results.values() if result.change is not None]
    if not changes:
        what = f"{len(results)} seeds were trained; --held-out N measures what they have learnt"
        return RunVerdict(kind="soft", what=what)
    kinds = [result.verdict.kind if result.verdict else "soft" for result in results.values()]
    learnt, worse = kinds.count("good"), kinds.count("bad")
    what = f"It learnt with {learnt} of {len(kinds)} seeds" + (f" and got worse with {worse}" if worse else "")
    median, low, high = statistics.median(changes), min(changes), max(changes)
    what += f": {metric} on held-out rollouts changed by {median:+.2f} (median; {low:+.2f} to {high:+.2f})"
    return RunVerdict(kind="good" if learnt == len(kinds) else "bad" if worse > learnt else "soft", what=what)


def show_seeds(console: Console, metric: str, results: Results) -> None:
    """Print a row for each seed, and the verdict over all."""
    table = Table("seed", "before", "after", "change (95 %)", "", title=f"{metric} on held-out rollouts")
    for seed, result in results.items():
        sides = ["-" if side is None else f"{side.mean:.2f}" for side in (result.before, result.after)]
        change = "-" if result.change is None else result.change.text(sign=True)
        kind = result.verdict.kind if result.verdict else "soft"
        words = "not measured" if result.change is None else _WORDS[kind]
        table.add_row(str(seed), *sides, change, words, style=None if kind == "good" else COLOURS[kind])
    verdict = judge_seeds(metric, results)
    console.print(table)
    console.print(f"{verdict.what}.", style=COLOURS[verdict.kind], highlight=False, soft_wrap=True)


def draw_seeds(path: Path, task: Task, results: Results) -> None:
    """Draw the headline metric by training step for all seeds, with a band from the lowest to the highest."""
    curves = [{report.step: report.headline for report in result.reports} for result in results.values()]
    last = max((step for curve in curves for step in curve), default=0)
    sides = {0: [one.before for one in results.values()], last: [one.after for one in results.values()]}
    held_out = {step: [side.mean for side in runs if side is not None] for step, runs in sides.items()}
    words = {"measure": task.headline_metric, "title": f"{task.description}: {len(curves)} seeds"}
    save_picture(path, lambda axes: plot_seeds(axes, curves, held_out=held_out, **words))


def summarise_seeds(metric: str, summaries: Mapping[int, Mapping[str, Any]], results: Results) -> dict[str, Any]:
    """Return what `--json` writes for several seeds: the summaries of all runs, and the verdict over them."""
    verdict = judge_seeds(metric, results)
    changes = [result.change.mean for result in results.values() if result.change is not None]
    return {
        "seeds": list(results), "verdict": verdict.what, "kind": verdict.kind, "changes": changes,
        "runs": list(summaries.values()),
    }  # fmt: skip
