"""A power cut in a pipeline: the last pages of the database's log are gone, and the script is started again.

A script trains the tiny model with `art.pipeline`. After a few steps it and all its processes get a SIGKILL. Then the
write-ahead log of `art.db` is cut at many places, each in a copy of the data directory, and the script is started again
on the copy. Every commit is synced, so a disk that keeps its word loses nothing that was acknowledged: the cuts show
what happens on one that does not, and after an old copy of the database was restored.

    python -m benchmarks power_cut --json power_cut.json
    python -m benchmarks power_cut --cuts 2 --quick
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import struct
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from art.storage import checkpoints
from art.storage.layout import DataDir
from benchmarks.kill_storm import tiny_model
from benchmarks.pipeline_client import GROUPS, ROLLOUTS
from benchmarks.pipeline_storm import PipelineRun, read_trained
from benchmarks.report import Cell, Result, Spread
from benchmarks.timing import progress

STALENESS = 2
STEPS_BEFORE, STEPS = 3, 5
_HEADER, _FRAME_HEADER = 32, 24
"""Bytes at the beginning of a write-ahead log, and before each of its pages (https://www.sqlite.org/fileformat2.html)."""


def frame_ends(log: Path) -> list[int]:
    """The offsets in a write-ahead log at which its frames end, from 0 frames to all that belong to its last round."""
    data = log.read_bytes()
    size, salts = struct.unpack(">I", data[8:12])[0] + _FRAME_HEADER, data[16:24]
    ends = [_HEADER]
    while data[ends[-1] + 8 : ends[-1] + 16] == salts:
        ends.append(ends[-1] + size)
    return ends


def cut_copy(data_dir: Path, target: Path, end: int) -> Path:
    """Copy a data directory whose processes have ended, with the log of its database cut at an offset.

    Returns:
        The database in the copy.
    """
    shutil.copytree(data_dir, target, ignore=shutil.ignore_patterns("art.db-shm"))
    database = DataDir(target).database
    with database.with_name("art.db-wal").open("r+b") as log:
        log.truncate(end)
    return database


def read_ids(database: Path) -> tuple[set[str], set[str], int | None]:
    """The exchanges and the jobs in a database, and the model's step; no step while no model is registered."""
    with closing(sqlite3.connect(database)) as db:
        tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
        if "models" not in tables or not (steps := db.execute("SELECT step FROM models").fetchall()):
            return set(), set(), None
        exchanges, jobs = (
            {row[0] for row in db.execute(sql)} for sql in ("SELECT id FROM exchanges", "SELECT job_id FROM jobs")
        )
        return exchanges, jobs, int(steps[0][0])


def read_cut(data_dir: Path, end: int) -> tuple[set[str], set[str], int | None]:
    """What `read_ids` reads after a cut. It reads a copy, because the last reader of a database removes its log."""
    with tempfile.TemporaryDirectory() as name:
        for file in ("art.db", "art.db-wal"):
            shutil.copy(data_dir / file, name)
        with (Path(name) / "art.db-wal").open("r+b") as log:
            log.truncate(min(end, log.seek(0, 2)))
        return read_ids(Path(name) / "art.db")


def choose(data_dir: Path, num_cuts: int) -> list[int]:
    """Return places of cuts, spread over the log from the registration of the model to its end."""
    ends = frame_ends(data_dir / "art.db-wal")
    low, last = 0, len(ends) - 1
    high = last
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if read_cut(data_dir, ends[middle])[2] is None else (low, middle)
    return sorted({ends[last - round(i * (last - low) / max(1, num_cuts - 1))] for i in range(num_cuts)})


def play(whole: PipelineRun, folder: Path, model: Path, end: int) -> tuple[dict[str, Any], list[str]]:
    """Cut, start again, and wait for the end of the training. Returns what was lost, and what went wrong."""
    folder.mkdir()
    run = PipelineRun(folder, model, STEPS, STALENESS)
    before, kept = (read_cut(whole.data_dir, place) for place in (sys.maxsize, end))
    cut_copy(whole.data_dir, run.data_dir, end)
    breaches, began = [], time.monotonic()
    try:
        run.start()
        if status := run.finish():
            breaches.append(f"the script ended with status {status}; see {folder}/script.log")
    finally:
        run.end()
    trained = read_trained(run)
    seconds = time.monotonic() - began
    counts = sum(trained.rollouts, Counter[tuple[str, str]]())
    breaches += [f"rollout {one} was trained {count} times" for one, count in counts.items() if count > 1]
    sizes = [step.total() for step in trained.rollouts]
    if sizes != [GROUPS * ROLLOUTS] * STEPS or trained.num_rows != STEPS:
        breaches.append(f"steps of {sizes} rollouts in {trained.num_rows} rows")
    after = read_ids(DataDir(run.data_dir).database)
    lost = (kept[0] - after[0]) | (kept[1] - after[1])
    if lost:
        breaches.append(f"{len(lost)} exchanges and jobs that the cut had left are gone")
    steps = DataDir(run.data_dir).model("storm", "agent").checkpoints
    for step in range(STEPS + 1):
        checkpoints.verify(steps / f"{step:04d}")
    lost_by_cut = {
        "exchanges": len(before[0] - kept[0]), "jobs": len(before[1] - kept[1]), "steps": STEPS_BEFORE - (kept[2] or 0),
    }  # fmt: skip
    text = (folder / "script.log").read_text(errors="replace")
    return {
        **lost_by_cut,
        "seconds": seconds,
        "said": "recorded answers in rollouts of an earlier run" in text,
    }, breaches


def measure(folder: Path, model: Path, num_cuts: int) -> tuple[list[dict[str, Any]], list[str], int]:
    """Run once, cut the power, then go on from each cut."""
    (folder / "whole").mkdir(parents=True)
    whole = PipelineRun(folder / "whole", model, STEPS, STALENESS)
    try:
        whole.start()
        if not whole.wait_for_steps(STEPS_BEFORE):
            return [], ["the run did not begin"], 0
    finally:
        whole.end()
    whole.left_of(list(whole.processes()))
    cuts, breaches = [], []
    ends = choose(whole.data_dir, num_cuts)
    with progress("cuts", total=len(ends)) as bar:
        for end in ends:
            cut, wrong = play(whole, folder / f"cut-{end}", model, end)
            cuts.append(cut)
            breaches += [f"cut at {end}: {one}" for one in wrong]
            if not wrong:
                shutil.rmtree(folder / f"cut-{end}")
            bar.update(1)
    return cuts, breaches, len(frame_ends(whole.data_dir / "art.db-wal")) - 1


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cuts", type=int, help="of the database's log (default: 50, with --quick 2)")


def run(args: argparse.Namespace) -> Result:
    num_cuts = args.cuts or (2 if args.quick else 50)
    with tempfile.TemporaryDirectory() as name, tiny_model(Path(name) / "model") as model:
        cuts, breaches, num_frames = measure(Path(name), model, num_cuts)
    row: dict[str, Cell] = {"cuts": len(cuts), "frames of the log": num_frames}
    row |= {f"{name} lost": Spread.of([cut[name] for cut in cuts]) for name in ("exchanges", "jobs", "steps")}
    row |= {"cuts with a finding": sum(cut["said"] for cut in cuts), "breaches": len(breaches)}
    return Result(
        summary=f"{len(cuts)} cuts of the database's log: {len(breaches)} breaches.",
        rows=[row],
        notes=[
            *(f"breach: {breach}" for breach in breaches[:20]),
            f"the power is cut after {STEPS_BEFORE} of {STEPS} steps of {GROUPS} groups of {ROLLOUTS} rollouts, "
            f"max_staleness {STALENESS}; then the same script is started again on a copy of the data directory whose "
            "log ends earlier",
            "checked: the script ends by itself; each rollout is trained and logged once; every step is full and has "
            "one row; every exchange and job that the cut had left is there at the end; every checkpoint is whole",
        ],
        clock="wall",
    )


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["power_cut", *sys.argv[1:]])
