"""Deaths on a Ray cluster while a pipeline trains: actors, ranks, nodes, the server and the script.

A script trains the tiny model with `art.pipeline` on three raylets of this machine, with two engines and a trainer of
two ranks. Again and again something dies: the process of an engine or of a rank by SIGKILL, or its actor; a whole node,
which then comes back as a new one; the server; the script. Once a node freezes for a minute, and once one leaves for
good. Then the same steps run undisturbed on this machine alone, and both are compared as in `pipeline_storm`.

    python -m benchmarks cluster_storm --cluster-kills 30 --json cluster_storm.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from benchmarks.kill_storm import _MARK, tiny_model
from benchmarks.pipeline_storm import PipelineRun, compare, read_trained
from benchmarks.report import Cell, Result, Spread
from benchmarks.storm_checks import check, read_record
from benchmarks.timing import progress
from tests.support.clusters import RayNodes, ray_nodes

VICTIMS = {"engine": 4, "engine actor": 3, "rank": 4, "node": 3, "server": 2, "script": 2}
"""How often each is chosen, relative to each other."""
FREEZE_S = 60.0
NODE_CPUS = 3
STEPS_PER_KILL = 3
OPTIONS = ("--cluster", "ray", "--replicas", "2", "--ranks", "2")


class ClusterRun(PipelineRun):
    """The script, with the raylets that engines and trainer run on."""

    def __init__(self, folder: Path, model: Path, steps: int, cluster: RayNodes) -> None:
        super().__init__(folder, model, steps, 0, OPTIONS)
        self.cluster = cluster
        os.environ[_MARK] = self._mark  # raylets and their workers are known by it too

    def find(self, victim: str) -> list[int]:
        """Process ids of a kind of victim, except nodes."""
        if victim in ("script", "server"):
            return self.pids_of(victim)
        words = {"engine": "engine_child", "rank": "trainer_child", "engine actor": "ray::WorkerActor"}[victim]
        found = [pid for pid, command in self.processes().items() if words in command]
        if victim == "engine actor":  # `ps` does not tell which actor has an engine: its child does
            engines = {_parent(pid) for pid in self.find("engine")}
            found = [pid for pid in found if pid in engines]
        return found

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


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def storm(run: ClusterRun, num_kills: int, rng: random.Random) -> tuple[dict[str, list[float]], list[str]]:
    """Let things die until `num_kills` have. Returns the seconds to recover by kind, and what went wrong."""
    recovered_s: dict[str, list[float]] = defaultdict(list)
    planned = rng.choices(list(VICTIMS), list(VICTIMS.values()), k=num_kills - 2)
    planned.insert(num_kills // 2, "frozen node")
    planned.append("node that leaves")
    run.allow(STEPS_PER_KILL)
    run.start()
    if not run.wait_for_steps(1):
        return recovered_s, ["the run did not begin"]
    with progress("deaths", total=num_kills) as bar:
        for kind in planned:
            time.sleep(rng.uniform(0.0, 2.0))
            before, at = run.num_steps(), time.monotonic()
            run.allow(before + STEPS_PER_KILL)  # one more than is waited for
            if kind == "frozen node":
                pids = run.cluster.nodes[-1].pids
                _signal(pids, signal.SIGSTOP)
                deadline = time.monotonic() + FREEZE_S
                while time.monotonic() < deadline:
                    time.sleep(0.1)
                _signal(pids, signal.SIGCONT)
            elif kind == "node that leaves":
                run.cluster.nodes.pop().kill()
            elif not run.end_one(kind, rng):
                continue
            if not run.wait_for_steps(before + 2) and not run.has_ended:
                return recovered_s, [f"no step came after the death of the {kind}"]
            recovered_s[kind].append(time.monotonic() - at)
            bar.update()
    run.allow(None)
    return recovered_s, []


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cluster-kills", type=int, help="deaths in all (default: 30, with --quick 6)")
    group.add_argument("--cluster-seed", type=int, default=0, help="of victims and moments (default: 0)")


def run(args: argparse.Namespace) -> Result:
    num_kills = args.cluster_kills or (6 if args.quick else 30)
    steps = STEPS_PER_KILL * (num_kills + 1)
    rng = random.Random(args.cluster_seed)
    with tempfile.TemporaryDirectory() as name, tiny_model(Path(name) / "model") as model:
        folders = [Path(name) / kind for kind in ("storm", "calm")]
        for folder in folders:
            folder.mkdir()
        calm = PipelineRun(folders[1], model, steps, 0)
        cluster = RayNodes(folders[0])
        disturbed = ClusterRun(folders[0], model, steps, cluster)
        try:
            with ray_nodes(folders[0], 2, NODE_CPUS, NODE_CPUS, into=cluster):
                recovered_s, breaches = storm(disturbed, num_kills, rng)
                if status := disturbed.finish():
                    breaches.append(f"the script ended with status {status}; see {folders[0]}/script.log")
            calm.start()
            if status := calm.finish():
                breaches.append(f"the undisturbed script ended with status {status}")
            worst, wrong = compare(read_trained(disturbed), read_trained(calm), 0)
            breaches += wrong + check(disturbed.data_dir, read_record(disturbed.record_path)).breaches
        finally:
            disturbed.end()
            calm.end()
    rows: list[dict[str, Cell]] = [
        {"died": kind, "times": len(times), "recovered s": Spread.of(times)} for kind, times in recovered_s.items()
    ]
    counts: Counter[str] = Counter({kind: len(times) for kind, times in recovered_s.items()})
    return Result(
        summary=f"{counts.total()} deaths on a Ray cluster: {len(breaches)} breaches.",
        rows=rows,
        notes=[
            *(f"breach: {breach}" for breach in breaches[:20]),
            f"{steps} steps; largest relative difference of a loss from the run without deaths: {worst:.1e}",
            "recovered: from the death to the end of the second step after it, in seconds of wall time; that of the "
            f"frozen node includes the {FREEZE_S:.0f} s of its freeze",
        ],
        clock="wall",
    )
