"""Agents and judges that misbehave: the pipeline goes on with the others, and says what it waits for."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import art
from art.asynchronous import flow
from art.asynchronous.step import PipelineStep
from tests.support.scripted_backend import ScriptedBackend, run_skipping


async def train(backend: ScriptedBackend, rollout: Any, steps: int, **settings: Any) -> list[PipelineStep]:
    sizes = {"rollouts_per_group": 4, "groups_per_step": 2, "max_concurrent": None, "max_staleness": 1}
    pipeline = art.pipeline(
        backend.model(), scenarios=lambda position: position, rollout=rollout, **{**sizes, **settings}
    )
    return [step async for step in pipeline.train(steps)]


def answer(scenario: int, rollout_index: int) -> art.Trajectory:
    return art.Trajectory(reward=float(rollout_index), metadata={"scenario_id": str(scenario)})


def scenarios_of(backend: ScriptedBackend) -> list[int]:
    return sorted(int(group.metadata["scenario_id"]) for call in backend.calls for group in call.groups)


def test_a_third_of_the_rollouts_fails_at_once(tmp_path: Path) -> None:
    backend = ScriptedBackend(tmp_path, train_s=1.0)

    async def rollout(model: Any, scenario: int, rollout_index: int) -> art.Trajectory:
        if (scenario + rollout_index) % 3 == 0:
            raise ConnectionError("the tool is down")
        await asyncio.sleep(2.0)
        return answer(scenario, rollout_index)

    steps = run_skipping(train(backend, rollout, 4))
    assert [step.number for step in steps] == [1, 2, 3, 4]
    assert scenarios_of(backend) == list(range(8)), "no group is lost for a few failures"
    groups = [group for call in backend.calls for group in call.groups]
    assert all(0 < len(group) < 4 for group in groups)
    assert {error.type for group in groups for error in group.exceptions} == {"ConnectionError"}
    assert all(trajectory.reward > -1 for group in groups for trajectory in group), "failures are not scored"
    assert any(step.metrics["data/infra_fault_rate"] > 0 for step in steps), "they are counted"


def test_scenarios_that_always_fail_are_replaced(tmp_path: Path) -> None:
    backend, calls = ScriptedBackend(tmp_path), Counter[int]()

    async def rollout(model: Any, scenario: int, rollout_index: int) -> art.Trajectory:
        calls[scenario] += 1
        if scenario in (1, 4):
            raise FileNotFoundError("no such page")
        return answer(scenario, rollout_index)

    run_skipping(train(backend, rollout, 3, max_fault_rate=0.9))
    assert scenarios_of(backend) == [0, 2, 3, 5, 6, 7], "the next scenarios of the stream take their places"
    assert set(calls.values()) == {4}


def test_a_judge_that_takes_long_is_waited_for_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "REPORT_AFTER_S", 0.05)
    caplog.set_level(logging.WARNING)
    backend, running = ScriptedBackend(tmp_path), Counter[int]()
    text = "the rollouts of some groups have ended, and `after_each` still works on them"

    async def rollout(model: Any, scenario: int, rollout_index: int) -> art.Trajectory:
        running[scenario] += 1
        return answer(scenario, rollout_index)

    async def judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        while group.metadata["scenario_id"] == "0" and not (text in caplog.text and len(running) == 6):
            await asyncio.sleep(0.01)  # the groups of two steps run, and the step that needs this one is named
        return group

    steps = asyncio.run(train(backend, rollout, 3, after_each=judge))
    assert scenarios_of(backend) == list(range(6))
    assert [call.step for call in backend.calls for g in call.groups if g.metadata["scenario_id"] == "0"] == [1]
    assert any(text in finding for step in steps for finding in step.findings)


def test_a_slow_evaluation_does_not_hold_up_the_training(tmp_path: Path) -> None:
    backend = ScriptedBackend(tmp_path)

    async def rollout(model: Any, scenario: int, rollout_index: int) -> art.Trajectory:
        return answer(scenario, rollout_index)

    async def play() -> list[PipelineStep]:
        release, steps = asyncio.Event(), []

        async def slow(model: Any, scenario: int) -> art.Trajectory:
            await release.wait()
            return answer(scenario, 1)

        pipeline = art.pipeline(
            backend.model(), scenarios=lambda position: position, rollout=rollout, evaluate=([0, 1], slow), every=2,
            rollouts_per_group=4, groups_per_step=2, max_concurrent=None,
        )  # fmt: skip
        async for step in pipeline.train(4):
            steps.append(step)
            if step.number == 3:
                release.set()
        return steps

    steps = asyncio.run(play())
    assert [[one.step for one in step.evaluations] for step in steps[:3]] == [[], [], []]
    assert [one.step for one in steps[3].evaluations] == [0, 2, 4], "the last step waits for them"
