"""SIGKILLs of script, server, engine and trainer while a pipeline trains: what is trained, and with which losses.

A script trains the tiny model with `art.pipeline`. Again and again one of its processes gets a SIGKILL, half of the
time at once, while the run still recovers from the one before; the script is started again when it was the victim. Then
the same steps run undisturbed, and both are compared: the rollouts that were trained, the rows of the log, and without
staleness the losses of each step.

    python -m benchmarks pipeline_storm --json pipeline_storm.json
    python -m benchmarks pipeline_storm --pipeline-kills 4 --quick
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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art.storage.atomic import write_file
from art.storage.jsonl import read_lines
from art.storage.layout import DataDir
from art.storage.trajectories import read_groups
from benchmarks.kill_storm import _MARK, AT_ONCE_SHARE, STEP_DEADLINE_S, VICTIMS, Run, tiny_model
from benchmarks.pipeline_client import GROUPS, ROLLOUTS
from benchmarks.report import Cell, Result, Spread
from benchmarks.storm_checks import check, read_record
from benchmarks.storm_client import NAME, PROJECT
from benchmarks.timing import progress

STALENESS = (0, 2)
STEPS_PER_KILL = 3
LONGEST_PAUSE_S = 1.5
LOSSES = ("loss/train", "loss/grad_norm", "loss/entropy", "loss/adapter_norm", "train/reward")
RELATIVE = 1e-4
"""Losses of a step may differ by so much: which requests share a batch of the engine is a matter of time, and the
float32 numbers of a batch depend on its size. Adam carries such differences on from step to step."""


class PipelineRun(Run):
    """The script and its processes. A step counts as finished when it is in the log."""

    client = "benchmarks.pipeline_client"

    def __init__(self, folder: Path, model: Path, steps: int, staleness: int, options: Sequence[str] = ()) -> None:
        """`options` are more of the script's."""
        super().__init__(folder, model)
        self.steps, self.staleness, self._options = steps, staleness, options
        self.paths = DataDir(self.data_dir).model(PROJECT, NAME)
        self._gate = folder / "gate"

    def allow(self, num_steps: int | None) -> None:
        """Let the script train up to this step, so that a fast run does not end before its kills; `None`: no limit."""
        if num_steps is None:
            self._gate.unlink(missing_ok=True)
        else:
            write_file(self._gate, str(num_steps).encode())

    def start(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with (self._folder / "script.log").open("ab") as log:
            self._script = subprocess.Popen(
                [
                    sys.executable, "-m", self.client, "--data-dir", str(self.data_dir),
                    "--model", str(self._model), "--record", str(self.record_path),
                    "--steps", str(self.steps), "--staleness", str(self.staleness), "--gate", str(self._gate),
                    *self._options,
                ],
                env=os.environ | {_MARK: self._mark}, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def num_steps(self) -> int:
        return self.paths.history.read_bytes().count(b'"row_id"') if self.paths.history.exists() else 0

    @property
    def has_ended(self) -> bool:
        return self._script is not None and self._script.poll() is not None

    def finish(self) -> int:
        """Wait for the end of the script, as long as it goes on; its exit status."""
        while not self.has_ended and self.wait_for_steps(self.num_steps() + 1):
            pass
        assert self._script is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._script.wait(STEP_DEADLINE_S)
        return -1

    def end(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass(slots=True)
class Trained:
    """What a run has trained, by its log."""

    rollouts: list[Counter[tuple[str, str]]] = field(default_factory=list)
    """For each step the scenarios and seeds of its rollouts."""
    losses: list[dict[str, float]] = field(default_factory=list)
    num_rows: int = 0
    num_run_twice: int = 0
    """Rollouts that came to their end more often than once: their script was killed before they were on disk."""


def read_trained(run: PipelineRun) -> Trained:
    rows = [row for _, row in read_lines(run.paths.history) if row is not None]
    trained = Trained(num_rows=len(rows))
    by_step = {row["step"]: row for row in rows}
    for step in range(1, run.steps + 1):
        groups = list(read_groups(run.paths.trajectories("train", step)))
        trained.rollouts.append(
            Counter((group.metadata["scenario_id"], one.metadata["seed"]) for group in groups for one in group)
        )
        trained.losses.append({name: by_step.get(step, {}).get(name, float("nan")) for name in LOSSES})
    ended = Counter(line["ended"] for line in read_record(run.record_path) if "ended" in line)
    trained.num_run_twice = sum(count - 1 for count in ended.values())
    return trained


def storm(run: PipelineRun, num_kills: int, rng: random.Random) -> tuple[Counter[str], list[float], list[str]]:
    """Kill processes of a run until it ends. Returns the victims, the times to recover, and what went wrong."""
    killed: Counter[str] = Counter()
    recovered_s: list[float] = []
    breaches: list[str] = []
    run.allow(STEPS_PER_KILL)
    run.start()
    if not run.wait_for_steps(1):
        return killed, recovered_s, ["the run did not begin"]
    with progress(f"kills with staleness {run.staleness}", total=num_kills) as bar:
        while killed.total() < num_kills and not run.has_ended:
            time.sleep(rng.uniform(0.0, LONGEST_PAUSE_S))
            running = [victim for victim in VICTIMS if run.pids_of(victim)]
            if not running:
                break
            victim = rng.choices(running, [VICTIMS[name] for name in running])[0]
            with contextlib.suppress(ValueError, ProcessLookupError):  # it has just ended by itself
                before, at = run.num_steps(), time.monotonic()
                run.allow(before + STEPS_PER_KILL)  # one more than is waited for: the next kill hits a step
                if left := run.kill(victim):
                    breaches.append(f"{len(left)} processes outlived the {victim}: {left}")
                killed[victim] += 1
                bar.update()
            if victim == "script":
                run.start()
            if rng.random() >= AT_ONCE_SHARE:
                if run.wait_for_steps(before + 2):
                    recovered_s.append(time.monotonic() - at)
                elif not run.has_ended:
                    breaches.append(f"no step within {STEP_DEADLINE_S:.0f} s after the death of the {victim}")
                    break
    run.allow(None)
    return killed, recovered_s, breaches


def compare(disturbed: Trained, calm: Trained, staleness: int, relative: float = RELATIVE) -> tuple[float, list[str]]:
    """The largest relative difference of a loss, and what is wrong."""
    breaches = []
    steps = len(calm.rollouts)
    for name, one in (("with kills", disturbed), ("without", calm)):
        if one.num_rows != steps:
            breaches.append(f"the log has {one.num_rows} rows of {steps} steps {name}")
        if any(count != 1 for count in sum(one.rollouts, Counter()).values()):
            breaches.append(f"a rollout was trained twice {name}")
    with_kills, without = sum(disturbed.rollouts, Counter[Any]()), sum(calm.rollouts, Counter[Any]())
    if with_kills != without:
        breaches.append(
            f"{(without - with_kills).total()} rollouts are missing, {(with_kills - without).total()} others"
        )
    worst = 0.0
    if staleness == 0:
        for step, (ours, theirs) in enumerate(zip(disturbed.losses, calm.losses, strict=True), 1):
            if disturbed.rollouts[step - 1] != calm.rollouts[step - 1]:
                breaches.append(f"step {step} trained other rollouts")
            for name in LOSSES:
                difference = abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-2)
                worst = max(worst, difference)
                if not difference <= relative:
                    breaches.append(f"{name} of step {step} is {ours[name]!r} with kills and {theirs[name]!r} without")
    return worst, breaches


def measure(folder: Path, model: Path, num_kills: int, staleness: int, seed: int) -> tuple[dict[str, Cell], list[str]]:
    steps = STEPS_PER_KILL * (num_kills + 1)
    runs = [PipelineRun(folder / name / "run", model, steps, staleness) for name in ("kills", "calm")]
    for one in runs:
        one._folder.mkdir(parents=True)
    try:
        killed, recovered_s, breaches = storm(runs[0], num_kills, random.Random(seed))
        for one in runs:
            if one is not runs[0]:
                one.start()
            if status := one.finish():
                breaches.append(f"a script ended with status {status}; see {one._folder}/script.log")
        if left := runs[0].left_of(list(runs[0].processes())):
            breaches.append(f"{len(left)} processes are left at the end: {left}")
        disturbed, calm = read_trained(runs[0]), read_trained(runs[1])
    finally:
        for one in runs:
            one.end()
    worst, wrong = compare(disturbed, calm, staleness)
    breaches += wrong + check(runs[0].data_dir, read_record(runs[0].record_path)).breaches
    row: dict[str, Cell] = {
        "max_staleness": staleness,
        "kills": killed.total(),
        "of": ", ".join(f"{victim} {count}" for victim, count in sorted(killed.items())),
        "steps": steps,
        "rollouts trained": sum(disturbed.rollouts, Counter[Any]()).total(),
        "rollouts run twice": disturbed.num_run_twice,
        "largest relative difference of a loss": worst if staleness == 0 else "-",
        "recovered s": Spread.of(recovered_s) if recovered_s else "-",
        "breaches": len(breaches),
    }
    return row, breaches


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--pipeline-kills", type=int, help="for each staleness (default: 25, with --quick 2)")
    group.add_argument("--kill-seed", type=int, default=0, help="of victims and moments (default: 0)")


def run(args: argparse.Namespace) -> Result:
    num_kills = args.pipeline_kills or (2 if args.quick else 25)
    rows, breaches = [], []
    with tempfile.TemporaryDirectory() as name, tiny_model(Path(name) / "model") as model:
        for staleness in STALENESS:
            row, wrong = measure(Path(name) / str(staleness), model, num_kills, staleness, args.kill_seed)
            rows.append(row)
            breaches += [f"staleness {staleness}: {one}" for one in wrong]
    total = sum(int(str(row["kills"])) for row in rows)
    return Result(
        summary=f"{total} SIGKILLs during pipelines: {len(breaches)} breaches.",
        rows=rows,
        notes=[
            *(f"breach: {breach}" for breach in breaches[:20]),
            f"{GROUPS} groups of {ROLLOUTS} rollouts per step; compared with a run of as many steps that nobody "
            "disturbs: the rollouts that were trained, by scenario and seed, each once; one row of the log per step; "
            f"with max_staleness 0 also {', '.join(LOSSES)} of every step, to {RELATIVE:g}",
            "also checked: every step is one job; every checkpoint is whole; no process outlives its parent; every "
            "error that the script saw says what died",
            "rollouts run twice: they had ended when their script was killed, and were not on disk yet",
            "recovered: from the kill to the end of the second step in the log after it, in seconds of wall time; "
            "kills that the next one followed at once are left out",
        ],
        clock="wall",
    )


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["pipeline_storm", *sys.argv[1:]])
