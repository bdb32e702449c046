"""SIGKILLs of the server of a remote training run, at random moments: the script goes on, and its losses stay the same.

A script (`remote_client`) trains the tiny model on an `art-server` that a loop starts again whenever it is gone, on the
same port and data directory. The server is killed again and again: half of the time after a whole step and a random
time, else at once, while the run still recovers. Then the same steps run on a server that nobody kills, and the losses
of each step are compared.

    python -m benchmarks remote_storm --json remote_storm.json
    python -m benchmarks remote_storm --server-kills 3
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kill_storm import AT_ONCE_SHARE, LONGEST_PAUSE_S, STEP_DEADLINE_S, tiny_model
from benchmarks.report import Cell, Result, Spread
from benchmarks.timing import progress

KEY = "storm-key-0123456789"
RELATIVE = 1e-5
"""Losses of a step may differ by so much: which requests share a batch of the engine is a matter of time, and the
float32 numbers of a batch depend on its size."""
START_DEADLINE_S = 60.0


class Supervised:
    """An `art-server` that a loop starts again whenever it has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.num_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="supervisor")
        self._thread.start()
        self._until_it_listens()

    def _until_it_listens(self) -> None:
        """A script gives up soon on an address where nobody ever listened."""
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.05)
        self.close()
        raise TimeoutError(f"the server did not listen within {START_DEADLINE_S:.0f} s; see {self.folder}/server.log")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _loop(self) -> None:
        command = [sys.executable, "-m", "art.cli.server", "--data-dir", str(self.folder / "data")]
        command += ["--port", str(self.port)]
        while not self._closing.is_set():
            self.num_starts += 1
            with (self.folder / "server.log").open("ab") as log:
                self._process = subprocess.Popen(
                    command, stdout=log, stderr=log, env=os.environ | {"ART_API_KEY": KEY}, start_new_session=True
                )
                self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                os.kill(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Its engine and trainer end with it."""
        self._closing.set()
        while self._thread.is_alive():
            self.kill()
            self._thread.join(0.2)


@dataclass(slots=True)
class Script:
    """The user's script, started once."""

    folder: Path
    model: Path
    url: str
    options: list[str]
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.remote_client", "--model", str(self.model)]
        command += ["--record", str(self.folder / "record.jsonl"), *self.options]
        with (self.folder / "script.log").open("ab") as log:
            env = os.environ | {"ART_SERVER_URL": self.url, "ART_API_KEY": KEY}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def steps(self) -> dict[int, dict[str, float]]:
        """Losses by step."""
        path = self.folder / "record.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return {line["step"]: line["losses"] for line in lines}

    def wait_for_steps(self, count: int) -> bool:
        deadline = time.monotonic() + STEP_DEADLINE_S
        while len(self.steps()) < count:
            if time.monotonic() > deadline or self.process.poll() is not None:
                return False
            time.sleep(0.05)
        return True

    def log_tail(self) -> str:
        return (self.folder / "script.log").read_text()[-2000:]


@dataclass(frozen=True, slots=True)
class Storm:
    losses: dict[int, dict[str, float]]
    num_starts: int
    recovered_s: list[float]
    """From a kill that was left alone to the end of the first step that began after it."""
    breaches: list[str]


def disturbed_run(folder: Path, model: Path, num_kills: int, rng: random.Random) -> Storm:
    stop, recovered_s, breaches = folder / "stop", [], []
    server = Supervised(folder)
    script = Script(folder, model, server.url, ["--stop", str(stop)])
    try:
        if not script.wait_for_steps(1):
            return Storm({}, server.num_starts, [], [f"the run did not begin: {script.log_tail()}"])
        with progress("kills", total=num_kills) as bar:
            for _ in range(num_kills):
                time.sleep(rng.uniform(0.0, LONGEST_PAUSE_S))
                before, killed = len(script.steps()), time.monotonic()
                server.kill()
                if rng.random() >= AT_ONCE_SHARE:
                    if not script.wait_for_steps(before + 2):
                        breaches.append(f"no step after a kill within {STEP_DEADLINE_S:.0f} s: {script.log_tail()}")
                        break
                    recovered_s.append(time.monotonic() - killed)
                bar.update()
        stop.touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            script.process.wait(STEP_DEADLINE_S)
        if script.process.poll() != 0:
            breaches.append(f"the script ended with status {script.process.poll()}: {script.log_tail()}")
        return Storm(script.steps(), server.num_starts, recovered_s, breaches)
    finally:
        script.process.kill()
        script.process.wait()
        server.close()


def calm_run(folder: Path, model: Path, num_steps: int) -> dict[int, dict[str, float]]:
    server = Supervised(folder)
    try:
        script = Script(folder, model, server.url, ["--steps", str(num_steps)])
        script.process.wait(STEP_DEADLINE_S * 4)
        return script.steps()
    finally:
        server.close()


def compare(storm: Storm, calm: dict[int, dict[str, float]]) -> tuple[float, list[str]]:
    """The largest relative difference of a loss, and what is wrong."""
    breaches = list(storm.breaches)
    expected = set(range(1, len(storm.losses) + 1))
    if set(storm.losses) != expected or set(calm) != expected:
        breaches.append(f"steps are {sorted(storm.losses)} with kills and {sorted(calm)} without")
    worst = 0.0
    for step in sorted(storm.losses.keys() & calm.keys()):
        for name, value in calm[step].items():
            found = storm.losses[step][name]
            difference = abs(found - value) / max(abs(value), 1e-2)  # a loss near 0 has no relative difference
            worst = max(worst, difference)
            if difference > RELATIVE:
                breaches.append(f"{name} of step {step} is {found!r} with kills and {value!r} without")
    return worst, breaches


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--server-kills", type=int, help="in all (default: 20, with --quick 3)")


def run(args: argparse.Namespace) -> Result:
    num_kills = args.server_kills or (3 if args.quick else 20)
    with tempfile.TemporaryDirectory() as name, tiny_model(Path(name) / "model") as model:
        folders = [Path(name) / "kills", Path(name) / "calm"]
        for folder in folders:
            folder.mkdir()
        storm = disturbed_run(folders[0], model, num_kills, random.Random(0))
        calm = calm_run(folders[1], model, len(storm.losses))
    worst, breaches = compare(storm, calm)
    row: dict[str, Cell] = {
        "kills": num_kills,
        "starts of the server": storm.num_starts,
        "steps": len(storm.losses),
        "largest relative difference of a loss": worst,
        "recovered s": Spread.of(storm.recovered_s) if storm.recovered_s else "-",
    }
    return Result(
        summary=f"{num_kills} SIGKILLs of the server during {len(storm.losses)} steps of a remote training: "
        f"{len(breaches)} breaches.",
        rows=[row],
        notes=[
            *(f"breach: {breach}" for breach in breaches),
            f"compared with a run of as many steps that nobody disturbs: {', '.join(sorted(calm.get(1, {})))} of every "
            f"step, to {RELATIVE:g}",
            "recovered: from the kill to the end of the first step that began after it, in seconds of wall time; kills "
            "that the next one followed at once are left out",
        ],
        clock="wall",
    )


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["remote_storm", *sys.argv[1:]])
