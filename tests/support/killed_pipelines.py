"""Runs a small pipeline in processes that end at one write of its journal, each of its writes in turn.

    python -m tests.support.killed_pipelines FOLDER --staleness 0 --stride 3

It prints one JSON object per pipeline: the undisturbed one first, then one for each place of a kill. The server is a file
that outlives the scripts: what it has trained, by job id.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import traceback
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import art
from art.asynchronous.journal import Journal
from art.errors import NotFoundError
from art.storage.jsonl import append_lines, read_lines
from art.storage.layout import DataDir
from art.storage.trajectories import read_groups
from tests.support.scripted_backend import ScriptedBackend, TrainCall

SCENARIOS = [{"id": f"s{index}"} for index in range(3)]
STEPS = 4
KILLED = 9
Settings = dict[str, Any]


@dataclass
class EndedJob:
    job_id: str
    result: art.TrainResult

    def __await__(self) -> Generator[Any, Any, art.TrainResult]:
        yield from asyncio.sleep(0).__await__()
        return self.result


@dataclass(eq=False)
class Server(ScriptedBackend):
    """Keeps each job in a file as soon as it is trained."""

    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.done = {row["job_id"]: row for _, row in read_lines(self.folder / "server.jsonl") if row is not None}
        self.step = len(self.done)

    async def follow_train_job(self, model: Any, job_id: str) -> Any:
        if job_id not in self.done:
            raise NotFoundError(f"there is no job {job_id}")
        return self.ended(job_id)

    def ended(self, job_id: str) -> EndedJob:
        return EndedJob(job_id, art.TrainResult(step=self.done[job_id]["step"], metrics={"loss/train": 0.5}))

    async def train(self, model: Any, groups: Any, config: Any = None, **options: Any) -> Any:  # type: ignore[override]
        job_id, groups = options["job_id"], list(groups)
        if job_id not in self.done:
            result = await self._train(TrainCall(job_id, self.step, groups, config))
            rollouts = [[one.metadata["seed"], one.reward] for group in groups for one in group]
            self.done[job_id] = {"job_id": job_id, "step": result.step, "rollouts": rollouts}
            append_lines(self.folder / "server.jsonl", [self.done[job_id]])
        await asyncio.sleep(0)
        return self.ended(job_id)


class KilledAt:
    """Ends the process before or after one write of the journal."""

    def __init__(self, at: int, *, is_after: bool) -> None:
        self.num_writes = 0
        write = Journal.write

        async def killing(journal: Journal, make: Any) -> None:
            self.num_writes += 1
            is_now = self.num_writes == at
            if is_now and not is_after:
                os._exit(KILLED)
            await write(journal, make)
            if is_now:
                os._exit(KILLED)

        Journal.write = killing  # type: ignore[method-assign]


async def rollout(model: Any, scenario: dict[str, str], rollout_index: int, seed: int) -> art.Trajectory:
    await asyncio.sleep(0.001 * (rollout_index + seed % 2))
    with (Path(model.base_path) / "ended.txt").open("a") as file:
        file.write(f"{seed}\n")
    return art.Trajectory(
        reward=float(rollout_index), metadata={"scenario_id": scenario["id"], "seed": f"{scenario['id']} {seed}"}
    )


async def judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup:
    await asyncio.sleep(0.001)
    for trajectory in group:
        trajectory.reward += 0.5
    return group


async def script(folder: Path, settings: Settings) -> None:
    """What the user has written."""
    pipeline = art.pipeline(
        Server(folder).model(), scenarios=SCENARIOS, rollout=rollout, after_each=judge, rollouts_per_group=2,
        groups_per_step=2, max_concurrent=None, **settings,
    )  # fmt: skip
    async for _ in pipeline.train(steps=STEPS):
        pass


def run(folder: Path, settings: Settings, at: int = -1, *, is_after: bool = False) -> int:
    """Run the script in a process of its own. Returns the number of writes, or 0 if it was killed."""
    folder.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            killer = KilledAt(at, is_after=is_after)
            asyncio.run(script(folder, settings))
            os._exit(100 + killer.num_writes)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != KILLED and status < 100:
        raise RuntimeError(f"the script ended with status {status}")
    return 0 if status == KILLED else status - 100


def describe(folder: Path, **more: Any) -> dict[str, Any]:
    """What was trained and logged."""
    paths = DataDir(folder).model("shop", "agent")
    groups = [group for step in range(1, STEPS + 1) for group in read_groups(paths.trajectories("train", step))]
    return {
        **more,
        "trained": [job["rollouts"] for job in Server(folder).done.values()],
        "rows": [[row["step"], row["train/reward"]] for _, row in read_lines(paths.history) if row is not None],
        "logged": sorted([one.metadata["seed"], one.reward] for group in groups for one in group),
        "num_run": len((folder / "ended.txt").read_text().split()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--stride", type=int, default=1)
    args = parser.parse_args()
    settings = {"max_staleness": args.staleness}
    (args.folder / "imports").mkdir(parents=True)
    asyncio.run(script(args.folder / "imports", settings))  # loads in this process what the others then have
    calm = args.folder / "calm"
    num_writes = run(calm, settings)
    print(json.dumps(describe(calm, num_writes=num_writes)), flush=True)
    for at in range(1, num_writes + 1, args.stride):
        folder = args.folder / str(at)
        is_after = at // args.stride % 2 == 1
        kills = [run(folder, settings, at, is_after=is_after), run(folder, settings, 3)]
        run(folder, settings)
        print(json.dumps(describe(folder, at=at, num_kills=kills.count(0))), flush=True)


if __name__ == "__main__":
    main()
