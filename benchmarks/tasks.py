"""Whether each ready task is learnt, how fast and at what cost: `art train` as users type it, over several seeds.

    python -m benchmarks tasks --task tic_tac_toe mail_search --seeds 101 102 103
    python -m benchmarks tasks --task game_2048 --seeds 101 --option size=4 --steps 20 --out out
    python -m benchmarks tasks --baselines           scripted policies of all measured tasks, in a minute
    python -m benchmarks tasks --table               draws pictures and writes tables again, and runs nothing

Each seed makes its own tiny model in a fresh data directory. What a seed found is written as soon as it has ended, to
one JSON file for each task; a later run of the same seed replaces it. A task without a reward of its own gets a
scripted judge, which `art judge serve` also runs. `benchmarks/README.md` says where the tables go.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from pathlib import Path

from art.task import get_task
from benchmarks.learnt.baselines import measure_baselines
from benchmarks.learnt.blocks import renew_pages
from benchmarks.learnt.results import RESULTS, Judge, Settings, read_all
from benchmarks.learnt.runs import Plan, measure
from benchmarks.learnt.tables import PICTURES, block, row_of_task, write_tables
from benchmarks.report import Result


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--task", nargs="+", default=["tic_tac_toe"], metavar="NAME", help="(default: tic_tac_toe)")
    group.add_argument("--seeds", nargs="+", type=int, default=[101, 102, 103], help="(default: 101 102 103)")
    group.add_argument("--held-out", type=int, help="held-out rollouts before and after (default: 400)")
    group.add_argument("--steps", type=int, help="training steps (default: the task's own)")
    group.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the task")
    group.add_argument("--jobs", type=int, default=1, help="runs at once (default: 1)")
    group.add_argument(
        "--baselines", action="store_true",
        help="in place of trainings, measure scripted policies of every task that has results: chance, the best fixed "
        "answer, the best rule",
    )  # fmt: skip
    group.add_argument("--table", action="store_true", help="only draw pictures and write tables of what was measured")
    group.add_argument("--out", type=Path, help="folder of results and pictures (default: those of this repository)")


def run(args: argparse.Namespace) -> Result:
    with contextlib.ExitStack() as stack:
        folder = args.out or RESULTS
        if args.quick and args.out is None:  # figures of a short form do not replace the real ones
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.baselines:
            for one in read_all(folder):
                if not one.settings.options:
                    one.put_baselines(asyncio.run(measure_baselines(one.task, count=args.evaluate or 400)), folder)
        elif not args.table:
            measure(plans(args), folder, jobs=args.jobs)
        results = read_all(folder)
        write_tables(results, folder, pictures=PICTURES if folder == RESULTS else folder)
        if folder == RESULTS:
            renew_pages("learnt", lambda page, name: block(results, page, name))
    return Result(
        summary="The headline metric on held-out rollouts before and after `art train NAME`.",
        rows=[row_of_task(one) for one in results],
        notes=[
            "medians over the seeds, in brackets the lowest and the highest seed",
            "CPU s and memory: of all processes together, the making of the tiny model included",
        ],
    )


def plans(args: argparse.Namespace) -> list[Plan]:
    """Return the runs that the options name."""
    return [Plan(task, seed, _settings(args, task)) for task in args.task for seed in args.seeds]


def _settings(args: argparse.Namespace, task: str) -> Settings:
    options = dict(_split_option(option) for option in args.option)
    return Settings(
        evaluate=args.held_out or (20 if args.quick else 400), steps=args.steps or (2 if args.quick else None),
        options=options, judge=Judge() if get_task(task, options, is_tiny=True).needs_judge else None,
    )  # fmt: skip


def _split_option(option: str) -> tuple[str, str]:
    key, equals, value = option.partition("=")
    if not key or not equals:
        raise SystemExit(f"--option {option}: expected KEY=VALUE, e.g. --option size=3")
    return key, value
