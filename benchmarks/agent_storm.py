"""Kills of agents, containers, the server and the script while agents work in containers: is each rollout counted once?

A script (`agent_storm_client`) trains the tiny model by `art.pipeline` on an `art-server`. Each rollout is a small
agent in a container of its own, which asks the model twice. Again and again something dies by SIGKILL: the process of
an agent, a whole container, the server, the script; the last two are started again. At the end, what the model's log
has trained is read, and what is left of containers, networks, volumes and folders.

    python -m benchmarks agent_storm --json agent_storm.json
    python -m benchmarks agent_storm --rollouts 40 --agent-kills 4 --image my-debian
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from art.storage.layout import DataDir
from art.storage.trajectories import read_groups
from art_agents.containers import ContainerEngine, Limits
from benchmarks.agent_storm_client import AT_ONCE, GROUPS, ROLLOUTS, write_task
from benchmarks.kill_storm import STEP_DEADLINE_S, tiny_model
from benchmarks.remote_storm import KEY, Supervised
from benchmarks.report import Cell, Result, Spread
from benchmarks.storm_checks import read_record
from benchmarks.storm_client import NAME
from benchmarks.timing import progress

VICTIMS = {"agent": 6, "container": 6, "server": 4, "script": 4}
"""How often each dies among as many deaths."""
LONGEST_PAUSE_S = 1.5
FIND_S = 120.0


@dataclass(slots=True)
class Storm:
    """The script, and what was killed."""

    folder: Path
    model: Path
    steps: int
    server: Supervised
    engine: ContainerEngine
    killed: Counter[str] = field(default_factory=Counter)
    breaches: list[str] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    """Processes of the script, of which one runs."""
    _script: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "benchmarks.agent_storm_client", "--folder", str(self.folder)]
        command += ["--model", str(self.model), "--steps", str(self.steps)]
        env = os.environ | {"ART_SERVER_URL": self.server.url, "ART_API_KEY": KEY}
        with (self.folder / "script.log").open("ab") as log:
            self._script = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        self.pids.append(self._script.pid)

    def containers(self, pids: list[int]) -> list[str]:
        """Names of the containers that processes have started."""
        names = self.ask("ps", "--all", "--filter=label=art.harbor", "--format={{.Names}}")
        return [name for name in names if any(f"-{pid}-" in name for pid in pids)]

    def ask(self, *arguments: str) -> list[str]:
        command = [self.engine.program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()

    def num_ended(self) -> int:
        return sum("ended" in line for line in read_record(self.folder / "record.jsonl"))

    def wait_for(self, num_ended: int) -> bool:
        """Wait until rollouts have ended; false if the script has, or nothing goes on."""
        assert self._script is not None
        deadline, before = time.monotonic() + STEP_DEADLINE_S, self.num_ended()
        while (now := self.num_ended()) < num_ended:
            if now > before:
                deadline, before = time.monotonic() + STEP_DEADLINE_S, now
            if time.monotonic() > deadline or self._script.poll() is not None:
                return False
            time.sleep(0.1)
        return True

    def kill(self, victim: str, rng: random.Random) -> bool:
        """Kill one of a kind; false if there is none."""
        assert self._script is not None
        if victim == "server":
            self.server.kill()
            return True
        if victim == "script":
            self._script.kill()
            self._script.wait()
            self.start()
            return True
        deadline = time.monotonic() + FIND_S
        while time.monotonic() < deadline and self._script.poll() is None:
            if victim == "agent":
                for pid in self.agents():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        return True
            elif names := self.containers(self.pids[-1:]):
                remove = [self.engine.program, "rm", "--force", "--volumes", rng.choice(names)]
                if subprocess.run(remove, capture_output=True, check=False).returncode == 0:
                    return True
            time.sleep(0.02)
        return False

    def agents(self) -> list[int]:
        """Processes of agents. This machine sees those in containers too, and Podman's belong to this user."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_agent = (entry / "cmdline").read_bytes() == b"python3\0-\0"
                if is_agent and f"ART_MODEL={self.folder.name}/".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def run(self, num_kills: int, rng: random.Random) -> float:
        """Let the script run to its end while things die. Returns the seconds after the end of its first rollout."""
        victims = [kind for kind, count in VICTIMS.items() for _ in range(count)]
        rng.shuffle(victims)
        num_rollouts = self.steps * GROUPS * ROLLOUTS
        self.start()
        going_on, began = self.wait_for(1), time.monotonic()
        with progress("deaths", total=num_kills) as bar:
            for number in range(num_kills):
                going_on = going_on and self.wait_for(1 + number * (num_rollouts - 2 * AT_ONCE) // num_kills)
                time.sleep(rng.uniform(0.0, LONGEST_PAUSE_S))
                victim = victims[number % len(victims)]
                if not going_on or not self.kill(victim, rng):
                    self.breaches.append(f"there was no {victim} to kill, or nothing went on")
                    break
                self.killed[victim] += 1
                bar.update()
        assert self._script is not None
        while self.wait_for(self.num_ended() + 1):
            pass
        if (status := self._script.poll()) != 0:
            self.breaches.append(f"the script ended with status {status}; see {self.folder}/script.log")
            self._script.kill()
            self._script.wait()
        return time.monotonic() - began

    def endings(self) -> Counter[str]:
        """How rollouts of trained groups have ended, each counted once."""
        paths, found, seen = DataDir(self.folder / "log").model(self.folder.name, NAME), Counter[str](), Counter[str]()
        for step in range(1, self.steps + 1):
            groups = list(read_groups(paths.trajectories("train", step)))
            if len(groups) != GROUPS:
                self.breaches.append(f"step {step} has {len(groups)} groups instead of {GROUPS}")
            for group in groups:
                if len(group.trajectories) + len(group.exceptions) != ROLLOUTS:
                    self.breaches.append(f"a group of step {step} lacks rollouts")
                seen.update(f"{one.metadata['scenario_id']} {one.metadata['index']}" for one in group)
                found.update(str(one.metadata["ending"]) for one in group)
                found.update(f"failed through no fault of the agent: {one.type}" for one in group.exceptions)
        if twice := [name for name, count in seen.items() if count > 1]:
            self.breaches.append(f"rollouts were trained twice: {twice}")
        return found

    def left(self, before: tuple[set[str], ...]) -> list[str]:
        """What is there and was not, or belongs to one of the script's processes."""
        folders = [path.name for path in Path(tempfile.gettempdir()).glob("art-address-*")]
        own = [name for name in folders if any(f"-{pid}-" in name for pid in self.pids)]
        now = self.resources()
        return [*self.containers(self.pids), *own, *(now[0] - before[0]), *(now[1] - before[1])]

    def resources(self) -> tuple[set[str], set[str]]:  # networks and volumes
        return set(self.ask("network", "ls", "--quiet")), set(self.ask("volume", "ls", "--quiet"))


async def starts_per_minute(engine: ContainerEngine, image: str, at_once: int, count: int) -> float:
    """Start containers, run a command in each, and remove them."""

    async def one(_: int) -> None:
        async with gate, engine.open(image, Limits()) as container:
            assert (await container.run("true", timeout_s=60)).code == 0

    gate, began = asyncio.Semaphore(at_once), time.monotonic()
    await asyncio.gather(*map(one, range(count)))
    return 60 * count / (time.monotonic() - began)


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rollouts", type=int, help="a multiple of 20 (default: 200, with --quick 40)")
    group.add_argument("--agent-kills", type=int, help="in all (default: 20, with --quick 4)")
    group.add_argument("--kill-seed", type=int, default=0, help="of victims and moments (default: 0)")
    group.add_argument("--image", default="debian:12-slim", help="image of Debian's family below the agent")


def run(args: argparse.Namespace) -> Result:
    num_kills = (4 if args.quick else 20) if args.agent_kills is None else args.agent_kills
    steps = (args.rollouts or (40 if args.quick else 200)) // (GROUPS * ROLLOUTS)
    engine, rows = ContainerEngine.find(), list[dict[str, Cell]]()
    with tempfile.TemporaryDirectory() as name, tiny_model(Path(name) / "model") as model:
        server_folder = Path(name, "server")
        server_folder.mkdir()
        for folder in ("calm", "storm"):
            write_task(Path(name, folder, "task"), args.image)
        image = asyncio.run(engine.build(Path(name, "calm", "task", "environment"), timeout_s=600))
        for at_once in (1, 4, 8):
            figure = asyncio.run(starts_per_minute(engine, image, at_once, 4 if args.quick else 24))
            rows.append(
                {"what": f"containers started, used and removed per minute, {at_once} at once", "value": figure}
            )
        with contextlib.closing(Supervised(server_folder)) as server:
            calm = Storm(Path(name, "calm"), model, max(steps // 5, 1), server, engine)
            storm = Storm(Path(name, "storm"), model, steps, server, engine)
            before = storm.resources()
            calm_s = calm.run(0, random.Random(0))
            storm.run(num_kills, random.Random(args.kill_seed))
            endings, breaches = storm.endings(), [*calm.breaches, *storm.breaches]
            left = [*calm.left(before), *storm.left(before)]
            seconds = [line["seconds"] for line in read_record(calm.folder / "record.jsonl") if "ended" in line]
            ended = storm.num_ended()
            if breaches:
                print(storm.folder.joinpath("script.log").read_text()[-3000:], file=sys.stderr)
    rows.append({"what": f"seconds of a rollout without kills, {AT_ONCE} at once", "value": Spread.of(seconds)})
    rows.append({"what": "rollouts per minute without kills, with their training", "value": 60 * len(seconds) / calm_s})
    rows += [{"what": f"kills of {kind}", "value": count} for kind, count in sorted(storm.killed.items())]
    rows += [{"what": f"rollouts that ended: {ending}", "value": count} for ending, count in endings.most_common()]
    failed = sum(count for ending, count in endings.items() if ending.startswith("failed through"))
    rows.append({"what": "rollouts that ended more often than once", "value": max(ended - endings.total() + failed, 0)})
    rows.append({"what": "containers, networks, volumes, folders left", "value": len(left)})
    breaches += [f"left: {one}" for one in left]
    return Result(
        summary=f"{storm.killed.total()} kills during {endings.total()} rollouts: {len(breaches)} breaches.",
        rows=rows,
        notes=[
            *(f"breach: {breach}" for breach in breaches[:20]),
            f"{engine.program}; {steps} steps of {GROUPS} groups of {ROLLOUTS} rollouts, each counted once in the log; "
            "each container has a volume of its image",
            "ended more often than once: the script was killed before the end was on disk, and the rollout began again",
        ],
        clock="wall",
    )  # fmt: skip


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["agent_storm", *sys.argv[1:]])
