"""Kills of random processes at random moments of a training run: what is lost, and how long until it goes on.

A script trains the tiny model, step after step. Again and again one of its processes gets a SIGKILL: the server, the
engine, the trainer, or the script itself, which is then started again. Half of the time the next kill waits for a whole
step and a random time, else it comes at once, while the run still recovers. In the end everything that the script
was told is compared with what is on disk (`storm_checks`).

    python -m benchmarks kill_storm --json kill_storm.json
    python -m benchmarks kill_storm --kills 5 --quick
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Cell, Result, Spread, error_bar, middle
from benchmarks.storm_checks import check, read_record
from benchmarks.timing import progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VICTIMS = {"server": 3, "engine": 3, "trainer": 3, "script": 1}
"""How often each is chosen, relative to each other."""
_WORDS = {
    "server": "art.cli.server",
    "engine": "engine_child",
    "trainer": "trainer_child",
}
"""What their names or command lines hold."""
AT_ONCE_SHARE = 0.5
"""Of kills that do not wait for a step to finish."""
LONGEST_PAUSE_S = 3.0
STEP_DEADLINE_S = 300.0
"""From a kill to the next finished step: beyond it the run counts as stuck."""
END_WITHIN_S = 10.0
"""From the death of a process to that of its children."""
_MARK = "ART_KILL_STORM"


@dataclass(frozen=True, slots=True)
class Kill:
    victim: str
    at_s: float
    """Since the start of the storm."""
    recovered_s: float | None
    """Until a step that began after it was finished; `None` where the next kill came first."""


class Run:
    """The script and all processes that come of it. They are known by a word in their environment."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self._mark = uuid.uuid4().hex
        self._script: subprocess.Popen[bytes] | None = None
        self.data_dir = folder / "data"
        self.record_path = folder / "record.jsonl"

    def start(self) -> None:
        self.data_dir.mkdir(exist_ok=True)
        with (self._folder / "script.log").open("ab") as log:
            self._script = subprocess.Popen(
                [
                    sys.executable, "-m", "benchmarks.storm_client", "--data-dir", str(self.data_dir),
                    "--model", str(self._model), "--record", str(self.record_path),
                ],
                env=os.environ | {_MARK: self._mark}, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def finish(self) -> int:
        """Let the script end by itself; its exit status."""
        (self.data_dir / "stop").touch()
        assert self._script is not None
        try:
            return self._script.wait(STEP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._script.kill()
            return self._script.wait()

    def processes(self) -> dict[int, str]:
        """Those that run: pid to name and command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{_MARK}={self._mark}".encode() not in (entry / "environ").read_bytes():
                    continue
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = f"{(entry / 'comm').read_text().strip()} {command}"
        return found

    def pids_of(self, victim: str) -> list[int]:
        if victim == "script":
            return [self._script.pid] if self._script is not None and self._script.poll() is None else []
        return [pid for pid, command in self.processes().items() if _WORDS[victim] in command]

    def kill(self, victim: str) -> list[int]:
        """Returns what it leaves behind: processes that should have ended with it."""
        (pid, *_) = self.pids_of(victim)
        doomed = _descendants(pid)
        os.kill(pid, signal.SIGKILL)
        if victim == "script":
            assert self._script is not None
            self._script.wait()
        return self.left_of(doomed)

    def left_of(self, doomed: list[int]) -> list[int]:
        deadline = time.monotonic() + END_WITHIN_S
        while left := [pid for pid in self.processes() if pid in doomed]:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.05)
        return []

    def num_steps(self) -> int:
        """Finished ones, of which the script was told."""
        return self.record_path.read_bytes().count(b'{"step"') if self.record_path.exists() else 0

    def wait_for_steps(self, count: int) -> bool:
        """Whether `count` steps are finished within the deadline."""
        deadline = time.monotonic() + STEP_DEADLINE_S
        while self.num_steps() < count:
            if time.monotonic() > deadline or self._script is None or self._script.poll() is not None:
                return False
            time.sleep(0.02)
        return True


def _descendants(pid: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found, front = [], [pid]
    while front:
        front = [child for child, parent in parents.items() if parent in front]
        found += front
    return found


def storm(run: Run, num_kills: int, rng: random.Random, label: str) -> tuple[list[Kill], list[str]]:
    """The kills, and what went wrong around them."""
    kills: list[Kill] = []
    breaches: list[str] = []
    run.start()
    if not run.wait_for_steps(1):
        return kills, ["the run did not begin"]
    started = time.monotonic()
    with progress(label, total=num_kills) as bar:
        while len(kills) < num_kills:
            time.sleep(rng.uniform(0.0, LONGEST_PAUSE_S))
            running = [victim for victim in VICTIMS if run.pids_of(victim)]
            victim = rng.choices(running, [VICTIMS[name] for name in running])[0]
            before, killed = run.num_steps(), time.monotonic()
            if left := run.kill(victim):
                breaches.append(f"{len(left)} processes outlived the {victim}: {left}")
            if victim == "script":
                run.start()
            at_once = rng.random() < AT_ONCE_SHARE
            # The next step was under way already; the one after it is the first that began later.
            if not at_once and not run.wait_for_steps(before + 2):
                breaches.append(f"no step was finished within {STEP_DEADLINE_S:.0f} s after the death of the {victim}")
                return kills, breaches
            kills.append(Kill(victim, killed - started, None if at_once else time.monotonic() - killed))
            bar.update()
    return kills, breaches


@contextlib.contextmanager
def tiny_model(folder: Path) -> Iterator[Path]:
    """Made in a process of its own: it loads torch."""
    command = [sys.executable, "-m", "art.cli.main", "tiny-model", str(folder), "--task", "yes_no_maybe"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    yield folder


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--kills", type=int, help="in all (default: 100, with --quick 3)")
    group.add_argument("--seed", type=int, default=0, help="of victims and moments (default: 0)")


def run(args: argparse.Namespace) -> Result:
    num_kills = args.kills or (3 if args.quick else 100)
    with tempfile.TemporaryDirectory() as name, tiny_model(Path(name) / "model") as model:
        one = Run(Path(name), model)
        try:
            kills, breaches = storm(one, num_kills, random.Random(args.seed), "kills")
            if status := one.finish():
                breaches.append(f"the script ended with status {status}")
            if left := one.left_of(list(one.processes())):
                breaches.append(f"{len(left)} processes are left at the end: {left}")
        finally:
            for pid in one.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        found = check(one.data_dir, read_record(one.record_path))
        breaches += found.breaches
    return Result(
        summary=f"{len(kills)} SIGKILLs during {found.counts['steps']} finished steps: {len(breaches)} breaches.",
        rows=[_row(victim, [kill for kill in kills if kill.victim == victim]) for victim in VICTIMS],
        notes=[
            *(f"breach: {breach}" for breach in breaches),
            ", ".join(f"{name}: {count}" for name, count in found.counts.items()),
            "recovered: from the kill to the end of the first training step that began after it, rollouts included, in "
            "seconds of wall time; kills that the next one followed at once are left out",
            "checked: every answer that the script got is stored with its text; every sampled token of a finished step "
            "is trained or accounted for; every step is one job; every checkpoint is whole; no process outlives its "
            "parent; every error that the script saw says what died, and how",
        ],
        clock="wall",
    )


def _row(victim: str, kills: list[Kill]) -> dict[str, Cell]:
    times = [kill.recovered_s for kill in kills if kill.recovered_s is not None]
    return {
        "killed": victim,
        "times": len(kills),
        "while it recovered": len(kills) - len(times),
        "recovered s": Spread.of(times) if times else "-",
        "90 % within s": sorted(times)[int(0.9 * len(times))] if times else "-",
    }


def draw(result: Result) -> Figure:
    """Time to recover by what was killed: median, and from the shortest to the longest."""
    from matplotlib.figure import Figure

    rows = [row for row in result.rows if isinstance(row["recovered s"], Spread)][::-1]
    times = [row["recovered s"] for row in rows]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.errorbar([middle(time) for time in times], range(len(rows)), xerr=error_bar(times), fmt="o", capsize=4)
    axes.set_yticks(range(len(rows)), [f"{row['killed']} ({row['times']} times)" for row in rows])
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from the kill to the end of a whole training step (median, shortest, longest)")
    axes.set_title(result.summary)
    axes.grid(axis="x", color="0.9")
    return figure


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["kill_storm", *sys.argv[1:]])
