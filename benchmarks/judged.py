"""Rewards by hand against RULER by a scripted judge, and what the judge's noise costs: held-out curves over seeds.

    python -m benchmarks judged                             all that the page on judges shows; skips what is there
    python -m benchmarks judged --judged-parts noise --judged-seeds 101 102
    python -m benchmarks judged --judged-table              draws pictures and writes tables again, and runs nothing
    python -m benchmarks judged --quick                     two steps of one seed: whether it works

The judge is `art.testing.judge.ScriptedJudge`: it knows how well a rollout did (`Task.score_messages`), errs by normal
noise, and favours what it is shown first. Each training that has ended is kept, and is not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path

from art.task import get_task
from benchmarks.judging.pictures import draw_all
from benchmarks.judging.plan import SETTINGS, TASKS, Planned, plan
from benchmarks.judging.results import RESULTS, JudgedTask, Training, read_all
from benchmarks.judging.summary import costs_of
from benchmarks.judging.tables import PICTURES, block, row_of
from benchmarks.judging.trainings import train_arms
from benchmarks.learnt.blocks import renew_pages
from benchmarks.report import Result


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--judged-parts", nargs="+", choices=TASKS, default=list(TASKS), help="(default: all)")
    group.add_argument("--judged-tasks", nargs="+", choices=list(SETTINGS), help="(default: those of each part)")
    group.add_argument("--judged-seeds", nargs="+", type=int, help="(default: those of each part)")
    group.add_argument("--judged-split", choices=("val", "test"), default="test", help="of evaluations (default: test)")
    group.add_argument("--judged-table", action="store_true", help="only draw pictures and write tables")
    group.add_argument("--judged-out", type=Path, help="folder of results (default: that of this repository)")


def run(args: argparse.Namespace) -> Result:
    logging.getLogger("art.rewards.ruler").setLevel(logging.ERROR)  # of groups whose rollouts are all equal
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.judged_out or (Path(temporary) if args.quick else RESULTS)
        if not args.judged_table:
            for planned in plan(args):
                asyncio.run(_train(planned, folder))
        results = read_all(folder)
        pictures = PICTURES if folder == RESULTS else folder
        draw_all(results, pictures)
        page = folder / "README.md"
        parts = [block(results, page, name, pictures) for name in ("compare", "noise")]
        page.write_text("\n".join(["# Judges\n\nMade by `python -m benchmarks judged`.\n", *parts]))
        if folder == RESULTS:
            renew_pages("judged", lambda page, name: block(results, page, name))
    return Result(
        summary="The headline metric on held-out rollouts, by where rewards came from.",
        rows=[
            row_of(judged.task, cost)
            for judged in results.values()
            for cost in costs_of(judged, dict.fromkeys(one.arm for one in judged.trainings))
        ],
        notes=["in brackets: 95 % intervals over the seeds (Student's t)", "a number after a judge is its reliability"],
    )


async def _train(planned: Planned, folder: Path) -> None:
    """Make the trainings of one seed that are not there yet."""
    task = get_task(planned.task, is_tiny=True)
    judged = JudgedTask.open(folder, task.name, task.headline_metric, planned.settings)
    arms = [arm for arm in planned.arms if judged.find(arm, planned.seed) is None]
    if not arms:
        return
    with tempfile.TemporaryDirectory() as data:
        async for training in train_arms(task, planned.seed, arms, planned.settings, Path(data)):
            judged = judged.put(training, folder)
            print(_line(task.name, training), file=sys.stderr, flush=True)


def _line(task: str, one: Training) -> str:
    reliability = "" if one.before is None else f", reliability {one.before.reliability:.2f}"
    return (
        f"{task} seed {one.seed}, {one.arm.name}: {one.curve[0].text} -> {one.curve[-1].text}{reliability}, "
        f"noise {one.noise:.3f}, {one.wall_s:.0f} s"
    )
