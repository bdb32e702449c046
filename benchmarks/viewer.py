"""How long the page's answers take on a large data directory, and what indexing and memory cost.

The directory has the files that ART's own writers make (`benchmarks/viewer_data.py`). Answers are asked as the page
asks them: first while nothing is indexed, then with the whole index, then for each further step that a training adds.

    python -m benchmarks viewer --viewer-steps 1000 --viewer-rollouts 256 --json viewer.json
    python -m benchmarks viewer --viewer-dir FOLDER                      keeps the directory, and uses it again
    python -m benchmarks viewer --viewer-dir FOLDER --viewer-keep-index  uses its index too: two minutes
    python -m benchmarks viewer --viewer-browser /usr/bin/chromium       draws the page too (needs Playwright)
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from art.storage.layout import DataDir
from art_page.rollout_answers import RolloutKey, RolloutTableQuery
from art_page.run_answers import CompareQuery, SeriesQuery
from art_page.viewer import Viewer
from benchmarks.page_paint import paint
from benchmarks.report import Cell, Result
from benchmarks.viewer_data import NAME, PROJECT, Size, Writer

QUICK = Size(steps=20, rollouts=32, recorded_steps=2)
_MORE_STEPS = 5
RUN = (PROJECT, NAME)
_METRICS = ["train/reward", "val/reward", "loss/entropy", "loss/kl_to_sampler", "train/right", "time/step_trainer_s"]


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--viewer-steps", type=int, default=1000, help="steps on the disk (default: 1000)")
    group.add_argument("--viewer-rollouts", type=int, default=256, help="rollouts of each step (default: 256)")
    group.add_argument(
        "--viewer-dir", type=Path, metavar="FOLDER", help="keep the directory here, or use the one there"
    )
    group.add_argument(
        "--viewer-keep-index", action="store_true",
        help="measure with the index of --viewer-dir, and add no step to the directory; an index that is not complete "
        "is completed first",
    )  # fmt: skip
    group.add_argument("--viewer-browser", metavar="CHROMIUM", help="also draw the page in this browser, headless")


def run(args: argparse.Namespace) -> Result:
    size = QUICK if args.quick else Size(steps=args.viewer_steps, rollouts=args.viewer_rollouts)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.viewer_dir or Path(temporary, "data")
        if not folder.exists():
            asyncio.run(Writer(folder, size).write_all())
        result = _measure(DataDir(folder), size, repeats=args.repeats, keep_index=args.viewer_keep_index)
        if args.viewer_browser:
            _draw_page(result, folder, size, args)
        return result


def _measure(data_dir: DataDir, size: Size, *, repeats: int, keep_index: bool) -> Result:
    if not keep_index:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{data_dir.viewer_index}{suffix}").unlink(missing_ok=True)
    before = resident_mb()
    peak = PeakMemory()
    rows = _first_answers(data_dir, size)
    viewer = Viewer(data_dir)
    answers = make_answers(viewer, size, Writer.vocabulary(0), random.Random(0))
    rows_meanwhile, index_note = _complete(viewer, answers)
    total = viewer.rollouts(*RUN, RolloutTableQuery(limit=1)).total
    rows += rows_meanwhile
    rows += [_row(name, [_timed(answer) for _ in range(max(repeats, 3))]) for name, answer in answers.items()]
    grown = peak.stop() - before
    viewer.close()
    again = Viewer(data_dir)
    rows.append(_row("first list of runs, with an index", [_timed(lambda: again.runs())]))
    again.close()
    index_mb = data_dir.viewer_index.stat().st_size / 1e6
    files_mb = sum(file.stat().st_size for file in data_dir.root.rglob("*.jsonl")) / 1e6
    notes = [
        f"memory of the process: at most {grown:.0f} MB above what it was before the viewer was made",
        f"the whole index has {index_mb:,.0f} MB{index_note}",
    ]
    if not keep_index:
        added = asyncio.run(_add_steps(data_dir, size))
        notes.append(
            f"a further step: {added * 1e3 / size.rollouts:.2f} ms CPU per rollout to index it and to answer the page"
        )
    return Result(
        summary=f"{size.steps:,} steps of {size.rollouts} rollouts in groups of 8; {total:,} rollouts with those held "
        f"out, {files_mb:,.0f} MB of JSON lines.",
        rows=rows,
        notes=notes,
        clock="wall",
    )


def _first_answers(data_dir: DataDir, size: Size) -> list[dict[str, Cell]]:
    """Ask for what the page shows first while there is no index: with one in another place."""
    with tempfile.TemporaryDirectory() as folder:
        viewer = Viewer(data_dir, index_path=Path(folder, "index.db"))
        rows = [
            _row("first list of runs, without an index", [_timed(lambda: viewer.runs())]),
            _row("first page of the newest step, without an index",
                 [_timed(lambda: viewer.rollouts(*RUN, RolloutTableQuery(step=size.steps, split="train")))]),
            _row("first page of all rollouts, without an index",
                 [_timed(lambda: viewer.rollouts(*RUN, RolloutTableQuery()))]),
        ]  # fmt: skip
        viewer.close()
    return rows


def _complete(viewer: Viewer, answers: dict[str, Callable[[], object]]) -> tuple[list[dict[str, Cell]], str]:
    """Make the index, and ask all the while. Returns rows and what the index took."""
    rng = random.Random(1)
    known = viewer.store.read("SELECT count(*) FROM rollouts")[0][0]
    meanwhile: dict[str, list[float]] = {name: [] for name in answers}
    cpu, began = time.process_time(), time.perf_counter()
    while not (page := viewer.rollouts(*RUN, RolloutTableQuery(limit=1))).is_total_exact:
        for name in rng.sample(list(answers), 2):
            meanwhile[name].append(_timed(answers[name]))
        time.sleep(1.0)
    if page.total == known:
        return [], " and was there before"
    cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    rows = [_row(f"{name}, while it is indexed", times) for name, times in meanwhile.items() if times]
    made = f"; {page.total - known:,} rollouts were indexed in {wall:.0f} s, with "
    return rows, f"{made}{cpu * 1e3 / (page.total - known):.2f} ms CPU each, answers asked meanwhile included"


def _draw_page(result: Result, folder: Path, size: Size, args: argparse.Namespace) -> None:
    """Add what a browser measures."""
    run = "/".join(RUN)
    group = f"train/{size.steps}/0"
    views = {
        "a run": "", "curves": "/curves", "rollouts": "/rollouts", "rollouts by reward": "/rollouts?sort=reward",
        "a rollout": f"/rollout/{group}/0", "exact tokens": f"/rollout/{group}/0?tab=tokens",
        "a group": f"/group/{group}", "prefix tree": f"/tree/{size.steps}", "ledger": "/ledger",
        "checkpoints": "/checkpoints", "costs": "/costs",
    }  # fmt: skip
    painted = paint(folder, run, views, args.viewer_browser, max(args.repeats, 3))
    result.rows.extend(_row(f"in the browser, {name}", seconds) for name, seconds in painted.seconds.items())
    result.notes.append(f"memory of `art view` with the browser: {painted.grown_mb:.0f} MB above what it was before")


def make_answers(viewer: Viewer, size: Size, words: list[str], rng: random.Random) -> dict[str, Callable[[], object]]:
    """Every answer of the page. Each repetition draws another step at random."""

    def step() -> int:
        return rng.randint(1, size.steps)

    def rollout() -> object:
        key = RolloutKey(split="train", step=step(), group=rng.randrange(size.rollouts // 8), index=rng.randrange(8))
        return viewer.rollout(*RUN, key)

    def held_out() -> int:
        return 10 * rng.randint(1, max(size.steps // 10, 1))

    def page(**query: object) -> Callable[[], object]:
        return lambda: viewer.rollouts(*RUN, RolloutTableQuery.model_validate(query))

    total = size.steps * size.rollouts
    return {
        "runs": viewer.runs,
        "a run": lambda: viewer.run(*RUN),
        "six curves": lambda: viewer.series(*RUN, SeriesQuery(metric=_METRICS)),
        "rollouts: newest": page(),
        "rollouts of a step, by reward": lambda: viewer.rollouts(*RUN, RolloutTableQuery(step=step(), sort="reward")),
        "rollouts of all steps, by reward": page(sort="reward"),
        "rollouts of all steps, by tokens, far down": page(sort="tokens", offset=total // 2),
        "rollouts with a reward in a range, by turns": page(min_reward=0.5, max_reward=0.9, sort="turns"),
        "rollouts that were dropped, by reward": page(dropped="any", sort="reward"),
        "search: a rare word": lambda: viewer.rollouts(*RUN, RolloutTableQuery(text=words[rng.randrange(9000, 10000)])),
        "search: a frequent word": lambda: viewer.rollouts(*RUN, RolloutTableQuery(text=words[30])),
        "search: the most frequent word, by reward": page(text=words[0], sort="reward"),
        "search: a phrase": page(text=f'"{words[0]} {words[1]}"'),
        "a rollout": rollout,
        "a group": lambda: viewer.group(*RUN, "train", step(), rng.randrange(size.rollouts // 8)),
        "a step": lambda: viewer.step(*RUN, step()),
        "ledger of all steps": lambda: viewer.ledger(*RUN),
        "checkpoints": lambda: viewer.checkpoints(*RUN),
        "two checkpoints compared": lambda: viewer.compare(*RUN, CompareQuery(a=held_out(), b=held_out())),
        "costs": lambda: viewer.costs(*RUN),
        "whether anything has changed": lambda: viewer.version(*RUN),
    }


async def _add_steps(data_dir: DataDir, size: Size) -> float:
    """Add steps as a training does, and return the CPU seconds that the page takes for each."""
    newest = max(int(file.stem) for file in data_dir.model(*RUN).trajectories("train", 1).parent.iterdir())
    writer = Writer(data_dir.root, Size(newest + _MORE_STEPS, size.rollouts, _MORE_STEPS), seed=1)
    await writer.start()
    viewer = Viewer(data_dir)
    viewer.rollouts(*RUN, RolloutTableQuery())
    costs = []
    for step in range(newest + 1, newest + 1 + _MORE_STEPS):
        await writer.write_step(step)
        await asyncio.sleep(0.6)
        began = time.process_time()
        viewer.runs()
        viewer.run(*RUN)
        viewer.series(*RUN, SeriesQuery(metric=_METRICS))
        while not viewer.rollouts(*RUN, RolloutTableQuery(limit=1)).is_total_exact:
            pass
        costs.append(time.process_time() - began)
    writer.close()
    viewer.close()
    return statistics.median(costs)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _row(name: str, seconds: list[float]) -> dict[str, Cell]:
    return {
        "answer": name,
        "median ms": round(statistics.median(seconds) * 1e3, 1),
        "max ms": round(max(seconds) * 1e3, 1),
        "times": len(seconds),
    }


class PeakMemory:
    """Follows the resident memory of this process in a thread."""

    def __init__(self) -> None:
        self._highest = resident_mb()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stopped.wait(0.05):
            self._highest = max(self._highest, resident_mb())

    def stop(self) -> float:
        """Return the highest value, in MB."""
        self._stopped.set()
        self._thread.join()
        return self._highest


def resident_mb() -> float:
    """Resident memory of this process, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["viewer", *sys.argv[1:]])
