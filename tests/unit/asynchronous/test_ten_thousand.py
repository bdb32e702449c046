"""10,000 rollouts in flight: the pace stays exact, the event loop stays free, and memory follows what is in flight."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

import art
from art.asynchronous.step import PipelineStep
from tests.support.scripted_backend import ScriptedBackend

SIZE, STALENESS, STEPS = 8, 1, 4
TURN_S = (0.5, 1.0, 2.0, 4.0)


class Crowd:
    """Rollouts of three turns, and what the event loop goes through meanwhile."""

    def __init__(self, folder: Path, num_in_flight: int) -> None:
        self.groups_per_step = num_in_flight // SIZE // (STALENESS + 1)
        self.backend = ScriptedBackend(folder, train_s=0.5)
        self.num_running = self.most_running = 0
        self.calls: Counter[tuple[int, int]] = Counter()
        self.bursts_s: list[float] = []
        """CPU seconds of the loop's thread between two turns of a task that wants every turn."""
        self.memory_bytes: list[int] = []
        """Resident memory after each step."""

    async def rollout(self, model: art.TrainableModel, scenario: int, rollout_index: int) -> art.Trajectory:
        self.calls[scenario, rollout_index] += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        rng = random.Random(f"{scenario}/{rollout_index}")
        trajectory = art.Trajectory(reward=float(rollout_index), metadata={"scenario_id": str(scenario)})
        for turn in range(3):
            trajectory.messages_and_choices.append({"role": "user", "content": f"turn {turn} " + "x" * 500})
            await asyncio.sleep(rng.choice(TURN_S))
        self.num_running -= 1
        return trajectory

    async def train(self) -> list[PipelineStep]:
        pipeline = art.pipeline(
            self.backend.model(), scenarios=lambda position: position, rollout=self.rollout, rollouts_per_group=SIZE,
            groups_per_step=self.groups_per_step, max_staleness=STALENESS, max_concurrent=None,
        )  # fmt: skip
        beating, process, steps = asyncio.create_task(self._beat()), psutil.Process(), []
        async for step in pipeline.train(STEPS):
            steps.append(step)
            self.memory_bytes.append(process.memory_info().rss)
        beating.cancel()
        return steps

    async def _beat(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.bursts_s.append(now - last)
            last = now
            await asyncio.sleep(0.001)
            last = time.thread_time()


def play(folder: Path, num_in_flight: int) -> tuple[Crowd, list[PipelineStep]]:
    crowd = Crowd(folder, num_in_flight)
    return crowd, asyncio.run(crowd.train())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_rollouts_in_flight(tmp_path: Path) -> None:
    few, _ = play(tmp_path / "few", 960)
    before = psutil.Process().memory_info().rss
    crowd, steps = play(tmp_path / "many", 10_000)

    assert crowd.most_running == 10_000, "the bound is reached, and never exceeded"
    num_groups = STEPS * crowd.groups_per_step
    trained = [int(group.metadata["scenario_id"]) for call in crowd.backend.calls for group in call.groups]
    assert sorted(trained) == list(range(num_groups)), "each group is trained exactly once"
    assert set(crowd.calls.values()) == {1}
    assert len(crowd.calls) == num_groups * SIZE, "no rollout was started for nothing"
    assert max(step.staleness_max for step in steps) == STALENESS
    assert all(len(call.groups) == crowd.groups_per_step for call in crowd.backend.calls)

    kib = (max(crowd.memory_bytes) - before) / 10_000 / 1024
    assert kib < 40, f"{kib:.0f} KiB per rollout in flight"
    assert crowd.memory_bytes[-1] < crowd.memory_bytes[1] + 30 * 2**20, "memory does not grow with the steps"
    usual = [statistics.quantiles(one.bursts_s, n=1000)[-1] for one in (few, crowd)]
    print(f"{kib:.1f} KiB per rollout in flight; most CPU seconds of one turn of the loop: {max(crowd.bursts_s):.3f}")
    assert max(crowd.bursts_s) < 1.0, "nobody else in the loop waits for a second"
    assert usual[1] < 0.05
