"""Loops of one's own: admission slots, the groups of the next step, and what is published."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import art
from art.asynchronous.pipeline import Pipeline
from art.client.rollout_context import current_rollout
from art.errors import ConfigError, TrajectoryError
from tests.support.scripted_backend import ScriptedBackend


def make(backend: ScriptedBackend, **settings: Any) -> Pipeline:
    sizes: dict[str, Any] = {"groups_per_step": 2, "max_staleness": 1}
    return art.pipeline(backend.model(), **sizes | settings)


def group(*rewards: float) -> art.TrajectoryGroup:
    return art.TrajectoryGroup([art.Trajectory(reward=reward) for reward in rewards])


async def test_a_loop_of_ones_own_is_paced(tmp_path: Path) -> None:
    backend = ScriptedBackend(tmp_path)
    pipeline = make(backend)
    model, seen, staleness = pipeline.model, [], []

    async def run(scenario: int) -> None:
        async with pipeline.group(scenario) as slot:
            context = current_rollout.get()
            assert context is not None
            assert (slot.scenario, context.step) == (scenario, slot.policy_version)
            assert model.get_inference_name() == f"shop/agent@{slot.policy_version}"
            await asyncio.sleep(0.002 * (scenario % 3))
            ended = group(0.0, 1.0)
            ended.metadata["version"] = slot.policy_version
            slot.finish(ended)

    tasks = [asyncio.create_task(run(scenario)) for scenario in range(12)]
    for step in range(6):
        groups = await pipeline.next_groups()
        assert len(groups) == 2
        staleness += [step - int(str(one.metadata["version"])) for one in groups]
        seen += groups
        with pytest.raises(ConfigError, match="call `published`"):
            await pipeline.next_groups()
        result = await (await backend.train(model, groups, job_id=str(step)))
        pipeline.published(result.step)
    await asyncio.gather(*tasks)
    assert len(seen) == 12
    assert set(staleness) == {0, 1}


async def test_groups_that_fail_give_their_place_back(tmp_path: Path) -> None:
    pipeline = make(ScriptedBackend(tmp_path), max_staleness=0, groups_per_step=1)
    with pytest.raises(ConnectionError):
        async with pipeline.group("a"):
            raise ConnectionError
    async with pipeline.group("b"):
        pass  # nothing was finished
    with pytest.raises(TrajectoryError, match="`finish` takes a finished TrajectoryGroup, got a list"):
        async with pipeline.group("c") as slot:
            slot.finish([])  # type: ignore[arg-type]
    async with pipeline.group("d") as slot:
        slot.finish(group(1.0))
    assert slot.number == 3
    assert len(await pipeline.next_groups()) == 1
    waiting = asyncio.create_task(pipeline.group("e").__aenter__())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    pipeline.published(0)  # nothing was learnt: the next step starts from the same checkpoint
    assert (await waiting).policy_version == 0


async def test_steps_out_of_turn_are_refused(tmp_path: Path) -> None:
    pipeline = make(ScriptedBackend(tmp_path), groups_per_step=1)
    with pytest.raises(ConfigError, match="`published` comes after `next_groups`"):
        pipeline.published(1)
    async with pipeline.group() as slot:
        slot.finish(group(0.0, 1.0))
    with pytest.raises(ConfigError, match="checkpoint 1 was published, expected"):
        pipeline.published(1)
    await pipeline.next_groups()
    with pytest.raises(ConfigError, match="checkpoint 3 was published, expected 1"):
        pipeline.published(3)
