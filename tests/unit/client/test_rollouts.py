"""Rollouts that other programs ran become groups: over HTTP, with the real client and the real application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

import art
from art.errors import ConfigError, ConflictError, ProcessError
from art.protocol.training import ModelStatus
from tests.support.app import AppBench
from tests.support.gateway import user

STATUS = ModelStatus(project="games", name="agent", base_model="tiny", step=3, inference_name="games/agent")


@pytest.fixture
async def model(app: AppBench) -> AsyncIterator[art.TrainableModel]:
    backend = art.Backend("http://art.test", "key")
    backend._client = app.client()
    model = art.TrainableModel(name="agent", project="games", base_model="tiny")
    model._backend = backend
    async with backend:
        yield model


async def agent(app: AppBench, rollout_id: str, **end: Any) -> None:
    """A program that knows nothing but a URL."""
    app.bench.answers(f"answer of {rollout_id}")
    async with app.http() as http:
        body = {"model": "games/agent", "messages": [user("hi")]}
        assert (await http.post(f"/rollouts/{rollout_id}/v1/chat/completions", json=body)).is_success
        if end:
            assert (await http.put(f"/api/rollouts/{rollout_id}", json=end)).is_success


async def test_groups_of_finished_rollouts(app: AppBench, model: art.TrainableModel) -> None:
    for i in range(3):
        await agent(app, f"a{i}", group_id="a", reward=float(i), metrics={"turns": 1}, scenario_id="s/1")
    await agent(app, "b0", group_id="b", reward=1.0)
    collecting = asyncio.create_task(model.collect_trajectory_groups(2, 2, timeout_s=20, pbar_desc=None))
    await asyncio.sleep(0.1)
    assert not collecting.done()
    await agent(app, "b1")
    await model.put_rollout("b1", outcome="infra_fault", error="the tool is down", group_id="b")
    first, second = await collecting
    assert [t.reward for t in first] == [0.0, 1.0, 2.0]
    assert first.trajectories[1].messages()[-1]["content"] == "answer of a1"
    assert first.trajectories[0].metadata == {"scenario_id": "s/1", "rollout_id": "a0"}
    assert (first.trajectories[0].initial_policy_version, first.metadata) == (3, {"group_id": "a"})
    assert [t.reward for t in second] == [1.0]
    assert [error.message for error in second.exceptions] == ["rollout b1: the tool is down"]


async def test_what_was_handed_out_does_not_come_again(
    app: AppBench, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(2):
        await agent(app, f"a{i}", group_id="a", reward=float(i))
    await model.put_rollout("silent", group_id="c", reward=1.0)
    await model.put_rollout("alone", reward=1.0)
    (group,) = await model.collect_trajectory_groups(1, 2, pbar_desc=None)
    await agent(app, "late", group_id="a", reward=1.0)
    with caplog.at_level(logging.WARNING), pytest.raises(ProcessError) as caught:
        await model.collect_trajectory_groups(1, 2, timeout_s=0, pbar_desc=None)
    assert "rollout late is too late" in caplog.text
    message = str(caught.value)
    assert "begun are: 'c' has 1. 1 finished rollouts have no group_id" in message
    (silent,) = await model.collect_trajectory_groups(1, 1, pbar_desc=None)
    assert [error.message for error in silent.exceptions] == ["rollout silent: it never asked the model"]

    # Another process sees the rest again, but nothing that was trained.
    model._collector = None
    await app.bench.gateway.rollouts.mark_trained(
        [item.exchange_id for t in group for item in t.messages_and_choices if hasattr(item, "exchange_id")],
        "job-1",
        "games",
    )
    again = await model.collect_trajectory_groups(2, 1, timeout_s=0, pbar_desc=None)
    assert [group.metadata["group_id"] for group in again] == ["c", "a"]
    assert [t.metadata["rollout_id"] for t in again[1]] == ["late"]


async def test_a_group_whose_job_came_to_nothing_comes_back(
    app: AppBench, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts = app.bench.gateway.rollouts
    for i in range(2):
        await agent(app, f"a{i}", group_id="a", reward=float(i))
    await model.put_rollout("a2", group_id="a", outcome="infra_fault", error="the tool is down")
    for i in range(3):
        (group,) = await model.collect_trajectory_groups(1, 3, timeout_s=20, pbar_desc=None)
        assert [t.reward for t in group] == [0.0, 1.0]
        assert len(group.exceptions) == 1
        ids = [item.exchange_id for t in group for item in t.messages_and_choices if hasattr(item, "exchange_id")]
        await rollouts.mark_trained(ids, f"job-{i}", "games")
        with pytest.raises(ProcessError):  # while it is trained it does not come
            await model.collect_trajectory_groups(1, 3, timeout_s=0, pbar_desc=None)
        await app.bench.database.run(lambda db, i=i: rollouts.unmark_trained(db, f"job-{i}"))
    assert "too late" not in caplog.text


async def test_a_refused_group_is_set_aside_and_the_others_of_its_call_come_again(
    app: AppBench, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts = app.bench.gateway.rollouts
    names = ["bad1", "bad2", "bad3", "good"]
    for name in names:
        for i in range(2):
            await agent(app, f"{name}-{i}", group_id=name, reward=float(i))
    await model.put_rollout("silent", group_id="bad1", outcome="infra_fault", error="crashed")
    for left in (4, 3, 2):
        groups = await model.collect_trajectory_groups(left, 2, timeout_s=20, pbar_desc=None)
        assert [group.metadata["group_id"] for group in groups] == names[-left:]
        every = [i for group in groups for i in exchange_ids(group)]
        await rollouts.mark_refused(every, exchange_ids(groups[0]), "groups[0] was sampled greedily", "games")
    for _ in range(2):  # the second time in another process
        caplog.clear()
        with caplog.at_level(logging.WARNING), pytest.raises(ProcessError) as caught:
            await model.collect_trajectory_groups(2, 2, timeout_s=0, pbar_desc=None)
        assert "Group 'bad1' is set aside: groups[0] was sampled greedily." in str(caught.value)
        assert "group bad3 cannot be trained and is set aside: groups[0] was sampled greedily" in caplog.text or _ == 0
        model._collector = None
    (good,) = await model.collect_trajectory_groups(1, 2, timeout_s=0, pbar_desc=None)
    assert good.metadata["group_id"] == "good"
    await rollouts.mark_trained(exchange_ids(good), "job-9", "games")
    async with app.http() as http:
        refused = (await http.get("/api/rollouts/bad2-0")).json()
    assert (refused["untrainable"], refused["trained_by"]) == ("groups[0] was sampled greedily", None)


def exchange_ids(group: art.TrajectoryGroup) -> list[str]:
    return [item.exchange_id for t in group for item in t.messages_and_choices if hasattr(item, "exchange_id")]


async def test_wrong_use(app: AppBench, model: art.TrainableModel) -> None:
    with pytest.raises(ConfigError, match="got 0 and 2"):
        await model.collect_trajectory_groups(0, 2)
    await model.put_rollout("r", reward=1.0)
    with pytest.raises(ConflictError, match="would change its `reward`"):
        await model.put_rollout("r", reward=2.0)
    async with app.http() as http:
        bad = await http.put("/api/rollouts/r", json={"reward": "high"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "reward")
        bad = await http.get("/api/rollouts?finished=perhaps")
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "finished")
