"""A laptop with the core package only, and a fresh account of another machine with nothing: launch, train, kill, down.

The machine is a user account of this one with an sshd of its own; see `tests/support/ssh_machine.py`. Times are
printed (`pytest -s`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support import ssh_machine
from tests.support.processes import children_of, is_running
from tests.support.ssh_machine import SshMachine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(ssh_machine.missing() is not None, reason=f"no other machine: {ssh_machine.missing()}"),
]
ROOT = Path(__file__).parents[2]
NUM_KILLS = 10
STEPS_PER_KILL = 2
NUM_STEPS = 25
STEP_DEADLINE_S = 600.0
RUN_DEADLINE_S = 3600.0
SERVER = "~/.art/servers/default"


@dataclass(slots=True)
class Laptop:
    """An environment with the core package, and a folder of its own."""

    python: Path
    folder: Path
    machine: SshMachine

    def art(self, *words: str) -> str:
        """Run an `art` command; returns what it prints."""
        done = subprocess.run(
            [str(self.python), "-m", "art.cli.main", *words], capture_output=True, text=True, cwd=self.folder,
            env=os.environ | {"ART_LAUNCHED_DIR": str(self.folder / "launched")}, timeout=3600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        tell(done.stderr)
        return done.stdout

    def start_training(self, name: str, num_steps: int) -> Training:
        settings = {
            "alias": ssh_machine.ALIAS, "ssh_config": self.machine.config, "source": str(ROOT), "name": name,
            "model": str(self.machine.home / "tiny"), "steps": num_steps, "log_dir": str(self.folder / f"log-{name}"),
            "record": str(self.folder / f"{name}.jsonl"),
        }  # fmt: skip
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(settings))
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [str(self.python), str(ROOT / "tests/support/ssh_client.py"), str(path)]
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        return Training(process, Path(settings["record"]), self.folder / f"{name}.log")


@dataclass(slots=True)
class Training:
    process: subprocess.Popen[bytes]
    record: Path
    log: Path

    def rows(self, key: str) -> list[dict[str, Any]]:
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [row for row in map(json.loads, lines) if key in row]

    def wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STEP_DEADLINE_S
        while not is_so():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.05)

    def wait_for_steps(self, count: int) -> None:
        self.wait_for(f"step {count}", lambda: len(self.rows("step")) >= count)

    def finish(self) -> None:
        try:
            assert self.process.wait(RUN_DEADLINE_S) == 0, self.log.read_text()[-3000:]
        finally:
            self.process.kill()

    def tunnels(self) -> list[int]:
        """Process ids of the ssh processes that hold tunnels."""
        pids = [pid for pid in children_of(self.process.pid) if is_running(pid)]
        return [pid for pid in pids if b"art-tunnel-open" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def until_answered_s(self, since: float) -> float:
        """Seconds from `since` until the server answers here."""
        (opened,) = self.rows("opened")
        with httpx2.Client(timeout=5.0) as http:
            while time.monotonic() < since + STEP_DEADLINE_S:
                try:
                    if http.get(f"{opened['opened']}/health").is_success:
                        return time.monotonic() - since
                except httpx2.TransportError:
                    time.sleep(0.02)
        raise AssertionError(self.log.read_text()[-3000:])


def tell(text: str) -> None:
    """Show times and progress; pytest hides them unless it is called with -s."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshMachine]:
    made = SshMachine(tmp_path_factory.mktemp("machine"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory, machine: SshMachine) -> Laptop:
    folder = tmp_path_factory.mktemp("laptop")
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", str(ROOT)], check=True)
    tell(f"the core package is installed on the laptop: {time.monotonic() - started:.0f} s")
    return Laptop(python, folder, machine)


@pytest.fixture(scope="module")
def launched(laptop: Laptop, machine: SshMachine) -> str:
    """What `art launch` prints. The machine has a tiny model then."""
    started = time.monotonic()
    host = ["--host", ssh_machine.ALIAS, "--ssh-config", machine.config, "--source", str(ROOT)]
    printed = laptop.art("launch", "--cloud", "ssh", *host)
    tell(f"art launch: {time.monotonic() - started:.0f} s")
    started = time.monotonic()
    command = f"cd ~ && {SERVER}/venv/bin/art tiny-model ~/tiny --task tic_tac_toe"
    subprocess.run(["runuser", "-u", machine.user, "--", "sh", "-c", command], check=True, capture_output=True)
    tell(f"the tiny model is made there: {time.monotonic() - started:.0f} s")
    return printed


@pytest.fixture(scope="module")
def key(launched: str, machine: SshMachine) -> str:
    return (machine.home / ".art/servers/default/api.key").read_text()


def servers(machine: SshMachine) -> list[int]:
    return [pid for pid, command in machine.processes().items() if "art.cli.server" in command]


def test_launch_prints_what_a_script_needs_and_leaves_the_server_running(
    launched: str, laptop: Laptop, machine: SshMachine, key: str
) -> None:
    folder = laptop.folder / "launched"
    assert "export ART_SERVER_URL=http://127.0.0.1:" in launched
    assert f"cat {folder}/gpu-box.key" in launched
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "gpu-box.json": 0o600, "gpu-box.key": 0o600,
    }  # fmt: skip
    assert (folder / "gpu-box.key").read_text() == key
    assert key not in (folder / "gpu-box.json").read_text()
    assert len(servers(machine)) == 1
    assert "running" in laptop.art("launch", "status")
    assert "art-server listens on http://127.0.0.1:" in laptop.art("launch", "logs", "gpu-box")


class Watch:
    """Looks for a secret in the process lists of this machine, again and again."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._ends = threading.Event()
        self.seen: set[str] = set()
        self.num_looks = 0
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def _look_on(self) -> None:
        while not self._ends.wait(0.5):
            self.num_looks += 1
            for entry in Path("/proc").glob("[0-9]*"):
                for name in ("cmdline", "environ"):
                    try:
                        content = (entry / name).read_bytes()
                    except OSError:
                        continue
                    if self._secret in content:
                        self.seen.add(f"{name} of {(entry / 'cmdline').read_bytes()!r}")

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


def files_with(secret: str, *folders: Path) -> list[Path]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if "venv" not in path.parts and secret.encode() in path.read_bytes()]


def test_nothing_is_lost_when_tunnel_and_server_are_killed_ten_times_each(
    launched: str, laptop: Laptop, machine: SshMachine, key: str
) -> None:
    watch, rng = Watch(key), random.Random(0)
    started = time.monotonic()
    calm = laptop.start_training("calm", NUM_STEPS)
    calm.finish()
    tell(f"an undisturbed run: {time.monotonic() - started:.0f} s")
    started = time.monotonic()
    stormy = laptop.start_training("stormy", NUM_STEPS)
    recovered: dict[str, list[float]] = {"tunnel": [], "server": []}
    stormy.wait_for("a connection", lambda: bool(stormy.rows("opened")))
    for number in range(NUM_KILLS):
        stormy.wait_for_steps(number * STEPS_PER_KILL)
        for victim in ("tunnel", "server"):
            time.sleep(rng.uniform(0.0, 3.0))  # the moment of a kill is random
            pids = stormy.tunnels if victim == "tunnel" else lambda: servers(machine)
            stormy.wait_for(f"a {victim}", lambda pids=pids: bool(pids()))
            os.kill(pids()[0], signal.SIGKILL)
            recovered[victim].append(stormy.until_answered_s(time.monotonic()))
    stormy.wait_for_steps(NUM_STEPS - 2)
    machine.kill_everything()
    rebooted_s = stormy.until_answered_s(time.monotonic())
    stormy.finish()
    watch.end()
    tell(f"the run with {NUM_KILLS} + {NUM_KILLS} kills and a reboot: {time.monotonic() - started:.0f} s")
    for victim, times in recovered.items():
        times.sort()
        tell(
            f"until the server answers after a {victim}'s death: median {times[len(times) // 2]:.2f} s, {times[-1]:.2f} s at most"
        )
    tell(f"until it answers after a reboot: {rebooted_s:.1f} s")
    tell(f"before, after: {[(run.rows('before')[0], run.rows('after')[0]) for run in (calm, stormy)]}")
    check_steps(calm, stormy)
    check_history(laptop.folder / "log-stormy")
    check_jobs(machine.home / ".art/servers/default/data/art.db")
    assert watch.num_looks > 10
    assert watch.seen == set()
    assert files_with(key, machine.home, machine.folder, laptop.folder) == [
        machine.home / ".art/servers/default/api.key", laptop.folder / "launched" / "gpu-box.key",
    ]  # fmt: skip


def check_steps(calm: Training, stormy: Training) -> None:
    """Each step was reported once, at the same address, with the numbers of the run that nobody disturbed."""
    for run in (calm, stormy):
        assert [row["step"] for row in run.rows("step")] == list(range(1, NUM_STEPS + 1))
        assert len({row["url"] for row in run.rows("step")}) == 1
    assert stormy.rows("after")[0]["tunnels"] > NUM_KILLS
    for key in ("reward", "loss"):
        numbers = [[row[key] for row in run.rows("step")] for run in (calm, stormy)]
        furthest = max(abs(one - other) for one, other in zip(*numbers, strict=True))
        tell(f"{key} by step without and with kills: {numbers}; largest difference {furthest:.2g}")
        assert furthest < 0.02, "a step that was lost or trained twice changes all later ones"
    for run in (calm, stormy):
        before, after = (run.rows(key)[0]["interval"] for key in ("before", "after"))
        assert after[0] > before[1], "it has learnt: the held-out intervals do not overlap"


def check_history(log_dir: Path) -> None:
    (history,) = log_dir.rglob("history.jsonl")
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    trained = [row["step"] for row in rows if "loss/train" in row]
    assert trained == list(range(1, NUM_STEPS + 1))


def check_jobs(path: Path) -> None:
    """On the server, each step of the stormy run is one job that succeeded, and no job is left half-way."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        jobs = [json.loads(row[0]) for row in database.execute("SELECT status FROM jobs")]
    mine = [(job["step"], job["state"]) for job in jobs if job["name"] == "stormy"]
    assert sorted(mine) == [(step, "succeeded") for step in range(1, NUM_STEPS + 1)]


def test_down_leaves_nothing(launched: str, laptop: Laptop, machine: SshMachine) -> None:
    laptop.art("launch", "stop", "gpu-box")
    assert machine.processes() == {}
    assert "stopped" in laptop.art("launch", "status")
    assert (machine.home / ".art/servers/default/data/art.db").exists()
    started = time.monotonic()
    laptop.art("launch", "down", "gpu-box", "--delete-data")
    tell(f"art launch down: {time.monotonic() - started:.1f} s")
    assert not (machine.home / ".art/servers/default").exists()
    assert list((laptop.folder / "launched").iterdir()) == []
    assert machine.processes() == {}
