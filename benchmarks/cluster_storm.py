"""Deaths on a Ray cluster while a pipeline trains: of actors, ranks, rollout workers, nodes, the server, the script.

A script trains the tiny model with `art.pipeline` on three raylets of this machine, with two engines, a trainer of two
ranks and rollouts in three workers. Again and again something dies: the process of an engine, a rank or a rollout
worker by SIGKILL, or an engine's actor; a whole node, which then comes back as a new one; the server; the script. Once
a node freezes for a minute, and at the end one leaves for good.

Then the same steps run undisturbed on this machine alone, where those rollouts fail that a death has cost in the storm.
Both are compared as in `pipeline_storm`. Answers do not depend on time here (`cluster_storm_client`), so the losses of
both must be equal.

    python -m benchmarks cluster_storm --json cluster_storm.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from art.storage.trajectories import read_groups
from benchmarks.cluster_storm_client import CHAT_TEMPLATE
from benchmarks.kill_storm import _MARK, tiny_model
from benchmarks.pipeline_client import ROLLOUTS
from benchmarks.pipeline_storm import PipelineRun, Trained, compare, read_trained
from benchmarks.report import Cell, Result, Spread
from benchmarks.storm_checks import check, read_record
from benchmarks.timing import progress
from tests.support.clusters import Node, RayNodes, ray_nodes

VICTIMS = {
    "engine": 5, "engine actor": 4, "rank": 5, "rollout worker": 7, "node": 3, "server": 2, "script": 2,
}  # fmt: skip
"""How often each dies among as many deaths."""
FREEZE_S = 60.0
LONGEST_WAIT_S = 20.0
"""For a rollout to begin, before the process of a worker without any is killed."""
RAY_SETTINGS = {
    "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5", "RAY_worker_niceness": "0",
}  # fmt: skip
"""With Ray's defaults a frozen node counts as dead after 65 s: five checks of 3 + 10 s. Its actors have a low priority,
with which they starve on a busy machine."""
NODE_CPUS = 4
STEPS_PER_KILL = 3
RELATIVE = 1e-5
"""Losses of a step may differ by so much."""
_WORDS = {
    "engine": "engine_child", "rank": "trainer_child", "engine actor": "ray::WorkerActor",
    "rollout worker": "ray::_Host",
}  # fmt: skip
"""What their command lines hold."""


class StormRun(PipelineRun):
    """The script of this storm; `options` are more of the script's."""

    client = "benchmarks.cluster_storm_client"


class ClusterRun(StormRun):
    """The script, with the raylets that engines, trainer and rollouts run on."""

    def __init__(self, folder: Path, model: Path, steps: int, cluster: RayNodes) -> None:
        super().__init__(folder, model, steps, 0, ("--cluster", "ray"))
        self.cluster = cluster
        os.environ |= RAY_SETTINGS
        os.environ[_MARK] = self._mark  # raylets and their workers are known by it too

    def find(self, victim: str) -> list[int]:
        """Process ids of a kind of victim, except nodes."""
        if victim in ("script", "server"):
            return self.pids_of(victim)
        found = [pid for pid, command in self.processes().items() if _WORDS[victim] in command]
        if victim == "engine actor":  # `ps` does not tell which actor has an engine: its child does
            engines = {_parent(pid) for pid in self.find("engine")}
            found = [pid for pid in found if pid in engines]
        if victim == "rollout worker":  # rather one that has something to lose
            deadline = time.monotonic() + LONGEST_WAIT_S
            while not (busy := self.running_in() & set(found)) and time.monotonic() < deadline:
                time.sleep(0.01)
            found = list(busy) or found
        return found

    def running_in(self) -> set[int]:
        """Processes with rollouts that have begun and not ended."""
        running: dict[int, int] = {}
        for line in read_record(self.record_path):
            if "began" in line:
                running[line["began"]] = line["pid"]
            elif "ended" in line:
                running.pop(line["ended"], None)
        return set(running.values())

    def end_one(self, victim: str, rng: random.Random) -> bool:
        """Kill one of a kind; false if there is none now."""
        if victim == "node":
            node = rng.choice(self.cluster.nodes[1:])
            node.kill()
            self.cluster.nodes.remove(node)
            self.cluster.add(NODE_CPUS)
            return True
        if not (pids := self.find(victim)):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(pids), signal.SIGKILL)
        if victim == "script":
            assert self._script is not None
            self._script.wait()
            self.start()
        return True

    def busy_node(self) -> Node:
        """A node with an engine or a rank, not the head."""
        words = _WORDS["engine"], _WORDS["rank"]
        at_work = {pid for pid, command in self.processes().items() if any(word in command for word in words)}
        return next((node for node in self.cluster.nodes[1:] if at_work & set(node.pids)), self.cluster.nodes[-1])

    def replace_if_gone(self, node: Node) -> None:
        """Start another node for one that Ray took for dead, and that has ended itself therefore."""
        deadline = time.monotonic() + LONGEST_WAIT_S
        while time.monotonic() < deadline:
            if node.has_ended:
                self.cluster.nodes.remove(node)
                self.cluster.add(NODE_CPUS)
                return
            time.sleep(0.1)


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def storm(run: ClusterRun, num_kills: int, rng: random.Random) -> tuple[dict[str, list[float]], list[str]]:
    """Let things die until `num_kills` have. Returns the seconds to recover by kind, and what went wrong."""
    recovered_s: dict[str, list[float]] = defaultdict(list)
    names = [kind for kind, count in VICTIMS.items() for _ in range(count)]
    rng.shuffle(names)
    planned = [names[i % len(names)] for i in range(num_kills - 2)]
    planned.insert(num_kills // 2, "frozen node")
    planned.append("node that leaves")
    run.allow(STEPS_PER_KILL)
    run.start()
    if not run.wait_for_steps(1):
        return recovered_s, ["the run did not begin"]
    with progress("deaths", total=num_kills) as bar:
        for kind in planned:
            time.sleep(rng.uniform(0.0, 2.0))
            before = run.num_steps()
            run.allow(before + STEPS_PER_KILL)  # one more than is waited for
            frozen = None
            if kind == "frozen node":
                frozen = run.busy_node()
                _signal(frozen.pids, signal.SIGSTOP)
            elif kind == "node that leaves":
                run.cluster.nodes.pop().kill()
            elif not run.end_one(kind, rng):
                return recovered_s, [f"there was no {kind} to end"]
            before, at = run.num_steps(), time.monotonic()
            run.allow(before + STEPS_PER_KILL)  # steps may have ended while the victim was looked for
            if not run.wait_for_steps(before + 2) and not run.has_ended:
                return recovered_s, [f"no step came after the death of the {kind}"]
            recovered_s[kind].append(time.monotonic() - at)
            if frozen is not None:
                time.sleep(max(0.0, at + FREEZE_S - time.monotonic()))
                _signal(frozen.pids, signal.SIGCONT)
                run.replace_if_gone(frozen)
            bar.update()
    run.allow(None)
    return recovered_s, []


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def lost_rollouts(run: ClusterRun, trained: Trained) -> tuple[list[int], Counter[str], list[str]]:
    """Seeds of rollouts that began and were not trained, how the log tells of them, and what is wrong."""
    seeds = {int(seed) for step in trained.rollouts for _, seed in step}
    lost = sorted({line["began"] for line in read_record(run.record_path) if "began" in line} - seeds)
    told: Counter[str] = Counter()
    breaches = []
    for step in range(1, run.steps + 1):
        for group in read_groups(run.paths.trajectories("train", step)):
            told.update(error.message for error in group.exceptions)
            if len(group) + len(group.exceptions) != ROLLOUTS:
                breaches.append(f"a group of step {step} has {len(group)} rollouts and {len(group.exceptions)} faults")
    if told.total() != len(lost):
        breaches.append(f"{len(lost)} rollouts were lost, and the log tells of {told.total()}")
    breaches += [f"a fault names no death: {message}" for message in told if "died" not in message]
    return lost, told, breaches


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cluster-kills", type=int, help="deaths in all (default: 30, with --quick 9)")
    group.add_argument("--cluster-seed", type=int, default=0, help="of victims and moments (default: 0)")


def run(args: argparse.Namespace) -> Result:
    num_kills = args.cluster_kills or (9 if args.quick else sum(VICTIMS.values()) + 2)
    steps = STEPS_PER_KILL * (num_kills + 1)
    rng = random.Random(args.cluster_seed)
    with tempfile.TemporaryDirectory() as name, tiny_model(Path(name) / "model") as model:
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        folders = [Path(name) / kind for kind in ("storm", "calm")]
        for folder in folders:
            folder.mkdir()
        lost_path = Path(name) / "lost.json"
        calm = StormRun(folders[1], model, steps, 0, ("--lost", str(lost_path)))
        cluster = RayNodes(folders[0])
        disturbed = ClusterRun(folders[0], model, steps, cluster)
        try:
            with ray_nodes(folders[0], 2, NODE_CPUS, NODE_CPUS, into=cluster):
                recovered_s, breaches = storm(disturbed, num_kills, rng)
                if status := disturbed.finish():
                    breaches.append(f"the script ended with status {status}; see {folders[0]}/script.log")
            trained = read_trained(disturbed)
            lost, told, wrong = lost_rollouts(disturbed, trained)
            lost_path.write_text(json.dumps(lost))
            calm.start()
            if status := calm.finish():
                breaches.append(f"the undisturbed script ended with status {status}")
            worst, different = compare(trained, read_trained(calm), 0, RELATIVE)
            found = check(disturbed.data_dir, read_record(disturbed.record_path))
            breaches += wrong + different + found.breaches
        finally:
            disturbed.end()
            calm.end()
    rows: list[dict[str, Cell]] = [
        {"died": kind, "times": len(times), "recovered s": Spread.of(times)} for kind, times in recovered_s.items()
    ]
    num_deaths = sum(map(len, recovered_s.values()))
    num_rollouts = sum(step.total() for step in trained.rollouts)
    return Result(
        summary=f"{num_deaths} deaths on a Ray cluster: {len(breaches)} breaches.",
        rows=rows,
        notes=[
            *(f"breach: {breach}" for breach in breaches[:20]),
            f"{steps} steps; largest relative difference of a loss from the run without deaths: {worst:.1e}",
            f"{num_rollouts} rollouts trained, each once; {told.total()} more were lost with the process or node that "
            f"they ran on, and are told as faults; {trained.num_run_twice} came to their end twice, since the process "
            f"died before they were on disk; {found.counts['answers']} answers came to rollouts, and all are stored",
            "recovered: from the death to the end of the second step after it, in seconds of wall time; the frozen "
            f"node stays frozen for {FREEZE_S:.0f} s, however soon the others go on",
        ],
        clock="wall",
    )


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["cluster_storm", *sys.argv[1:]])
