"""`art.RayWorkers`: rollouts in processes of a Ray cluster end as they would in the script."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

import art
from art.errors import ConfigError, RolloutError
from art.faults import kind_of, place_of
from art.testing.scripted_server import ScriptedServer, completion, failure
from art.trajectory import RemoteTraceback
from art_cluster import ray_workers
from art_cluster.ray_workers import RayWorkers
from tests.support import worker_rollouts
from tests.support.clusters import ray_in_this_process
from tests.support.scripted_backend import ScriptedBackend
from tests.support.worker_rollouts import AgentError, Game, Note

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'agent-reinforcement-trainer[cluster]'")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_in_this_process():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[RayWorkers]:
    async with RayWorkers(1, cpus=0.5) as pool:
        yield pool


@contextlib.contextmanager
def scripted_model() -> Iterator[art.Model]:
    def reply(body: dict[str, Any]) -> Any:
        status, answer = completion(body, {"content": f"yes, {body['messages'][-1]['content']}"})
        return status, answer | {"id": "fixed", "created": 1}

    with ScriptedServer(reply) as server:
        yield art.Model(
            name="agent", project="shop", inference_base_url=server.base_url, inference_api_key="key",
            inference_model_name="agent-7b",
        )  # fmt: skip


def comparable(groups: list[art.TrajectoryGroup]) -> list[Any]:
    return [group.model_dump(exclude={"trajectories": {"__all__": {"start_time"}}}) for group in groups]


async def test_a_gather_returns_what_it_returns_without_workers(workers: RayWorkers) -> None:
    with scripted_model() as model:

        def pending() -> list[Any]:
            notes = [Note("a"), Note("b")]
            return [art.TrajectoryGroup(worker_rollouts.chat(model, n, i, seed=i) for i in range(3)) for n in notes]

        here = await art.gather_trajectory_groups(pending(), pbar_desc=None)
        there = await art.gather_trajectory_groups(pending(), pbar_desc=None, workers=workers)
    assert comparable(there) == comparable(here)
    assert [type(item) for item in there[0].trajectories[0].messages_and_choices] == [
        type(item) for item in here[0].trajectories[0].messages_and_choices
    ]


async def test_errors_come_back_with_their_type_text_and_place(workers: RayWorkers) -> None:
    fates = ["agent_error", "value_error", "infra", "answer"]
    rollouts = [worker_rollouts.fate(Note("n", fate)) for fate in fates]
    agent, value, infra, good = await art.gather_trajectories(
        rollouts, workers=workers, max_exceptions=9, pbar_desc=None
    )
    assert isinstance(agent, AgentError)
    assert (str(agent), agent.tool, agent.status_code) == ("search answered 503", "search", 503)
    assert isinstance(value, ValueError)
    assert str(value) == "no such board"
    assert isinstance(value.__cause__, RemoteTraceback)
    assert "worker_rollouts.py" in place_of(value)
    assert "in fate" in art.trajectory.PydanticException.from_exception(value).traceback
    assert isinstance(infra, RolloutError)
    assert isinstance(good, art.Trajectory)


async def test_an_error_of_openai_keeps_what_its_status_says(workers: RayWorkers) -> None:
    with ScriptedServer(lambda body: failure(429, "slow down")) as server:
        (error,) = await art.gather_trajectories(
            [worker_rollouts.refused(server.base_url)], workers=workers, max_exceptions=1, pbar_desc=None
        )
    assert isinstance(error, openai.RateLimitError)
    assert (error.status_code, kind_of(error)) == (429, "rate_limit")


async def test_a_late_rollout_is_cancelled_in_its_worker(workers: RayWorkers, tmp_path: Path) -> None:
    notes = [Note("slow", "hang", str(tmp_path)), Note("fast", "answer", str(tmp_path))]
    late, good = await art.gather_trajectories(
        [worker_rollouts.fate(note) for note in notes], workers=workers, rollout_timeout_s=0.5, max_exceptions=1,
        pbar_desc=None,
    )  # fmt: skip
    assert isinstance(late, TimeoutError)
    assert "longer than 0.5 s" in str(late)
    assert isinstance(good, art.Trajectory)
    assert worker_rollouts.logged(tmp_path, "slow") == ["began", "cancelled"]


async def test_waiting_for_a_worker_does_not_count_as_time_of_a_rollout() -> None:
    async with RayWorkers(1, cpus=0.5, concurrency=1) as one_by_one:
        rollouts = [worker_rollouts.waits(0.4) for _ in range(4)]
        ended = await art.gather_trajectories(rollouts, workers=one_by_one, rollout_timeout_s=1.2, pbar_desc=None)
    assert [trajectory.reward for trajectory in ended] == [1.0] * 4


async def test_cancelling_a_gather_cancels_its_rollouts_and_waits_for_them(workers: RayWorkers, tmp_path: Path) -> None:
    rollouts = [worker_rollouts.fate(Note(f"n{index}", "hang", str(tmp_path))) for index in range(3)]
    gather = asyncio.create_task(art.gather_trajectories(rollouts, workers=workers, pbar_desc=None))
    while not all(worker_rollouts.logged(tmp_path, f"n{index}") for index in range(3)):
        await asyncio.sleep(0.02)
    gather.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gather
    assert [worker_rollouts.logged(tmp_path, f"n{index}") for index in range(3)] == [["began", "cancelled"]] * 3
    assert (await workers.run(worker_rollouts.length, "still there")) == 11


async def test_a_rollout_that_crashes_its_process_is_the_only_one_that_fails(
    workers: RayWorkers, tmp_path: Path
) -> None:
    fates = ["wait", "segfault", "wait", "wait"]
    watch = art.FaultWatch()
    (group,) = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(worker_rollouts.fate(Note(f"n{i}", f, str(tmp_path))) for i, f in enumerate(fates))],
        workers=workers, faults=watch, pbar_desc=None,
    )  # fmt: skip
    assert [trajectory.metadata["id"] for trajectory in group] == ["n0", "n2", "n3"]
    assert [(error.type, "died while this rollout ran alone" in error.message) for error in group.exceptions] == [
        ("RolloutError", True)
    ]
    assert watch.num_faults == 1
    assert worker_rollouts.logged(tmp_path, "n1") == ["began", "began"]
    assert worker_rollouts.logged(tmp_path, "n0") == ["began", "began", "ended"]


async def test_methods_decorated_functions_and_captures_run_in_workers(workers: RayWorkers) -> None:
    with scripted_model() as model:
        rollouts = [
            worker_rollouts.decorated(1, 2, 3, by=2, extra=5),
            Game(2.0).rollout([1, 4]),
            Game.free(7.0),
            art.capture_auto_trajectory(worker_rollouts.asks(model), model=model),
        ]
        one, game, free, captured = await art.gather_trajectories(rollouts, workers=workers, pbar_desc=None)
    assert (one.reward, one.logs) == (17.0, ["decorated"])
    assert game.reward == 6.0
    assert (free.reward, free.metadata) == (7.0, {"class": "Game"})
    assert captured.messages()[-1]["content"] == "yes, captured"


async def test_judges_may_use_workers_themselves(workers: RayWorkers) -> None:
    async def judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        for trajectory in group:
            trajectory.reward = await workers.run(worker_rollouts.length, str(trajectory.metadata["id"]))
        return group

    (group,) = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(worker_rollouts.fate(Note(name)) for name in ("a", "abc"))],
        after_each=judge,
        pbar_desc=None,
    )
    assert [trajectory.reward for trajectory in group] == [1, 3]


async def test_costs_that_are_booked_in_workers_are_in_the_ledger_of_the_script(
    workers: RayWorkers, tmp_path: Path
) -> None:
    fields = {"inference_base_url": "http://shop.test/v1", "inference_api_key": "key"}
    model = art.Model(name="agent", project="shop", base_path=str(tmp_path), budget_usd=0.5, **fields)
    await art.gather_trajectories([worker_rollouts.book(model, 0.2) for _ in range(2)], workers=workers, pbar_desc=None)
    assert model.costs.spent_usd == pytest.approx(0.4)
    model.costs.book("judge/ruler", usd=0.2)  # the worker must hear of it
    with pytest.raises(art.errors.BudgetError):
        await art.gather_trajectories([worker_rollouts.book(model, 0.2)], workers=workers, pbar_desc=None)


async def test_functions_that_workers_cannot_import_are_refused_before_anything_runs(
    workers: RayWorkers, tmp_path: Path
) -> None:
    async def nested() -> art.Trajectory:
        return art.Trajectory()

    good = worker_rollouts.fate(Note("good", "answer", str(tmp_path)))
    with pytest.raises(ConfigError, match=r"nested`: expected an `async def` at the top level of a module"):
        await art.gather_trajectory_groups([art.TrajectoryGroup([good, nested()])], workers=workers, pbar_desc=None)
    with pytest.raises(ConfigError, match="an argument of `waits` cannot be sent to a worker"):
        await art.gather_trajectories([worker_rollouts.waits(lambda: 1)], workers=workers, pbar_desc=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="workers cannot import"):
        await workers.run(lambda: 1)
    with pytest.raises(ConfigError, match="expected an `async def` at the top level"):
        art.pipeline(
            art.TrainableModel(name="a", project="p", base_model="b"), scenarios=[1], workers=workers,
            rollout=lambda model, scenario: worker_rollouts.waits(0),
        )  # fmt: skip
    assert worker_rollouts.logged(tmp_path, "good") == []


async def test_a_function_that_only_the_script_can_import_is_refused_by_the_worker(
    workers: RayWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("only_here")
    exec("import art\nasync def rollout():\n    return art.Trajectory()", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"No module named 'only_here'.*install what it imports there"):
        await workers.run(module.rollout)
    assert time.monotonic() - began < 10


async def test_a_node_with_another_version_is_named(workers: RayWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "VERSION", "0.0.1")  # of the script; the node has its own
    with pytest.raises(ConfigError, match=r"the node .* has ART .*, and the script has 0\.0\.1: install the same"):
        await RayWorkers(1, cpus=0.5).run(worker_rollouts.length, "a")


async def test_more_workers_than_there_is_room_for_are_refused_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"8 workers with CPU 1 each, and the cluster has room for 2: 1 nodes with 2 CPU"
    ):
        await RayWorkers(8, cpus=1).run(worker_rollouts.length, "a")
    with pytest.raises(ConfigError, match=r"browser 1 each, and the cluster has room for 0"):
        await RayWorkers(1, resources={"browser": 1}).run(worker_rollouts.length, "a")
    assert time.monotonic() - began < 10


async def test_an_address_of_this_machine_alone_is_refused_for_workers_elsewhere(
    workers: RayWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_workers, "_loopback", lambda: "another machine")
    with scripted_model() as model, pytest.raises(ConfigError, match=r"127.0.0.1.*art-server --host 0.0.0.0"):
        await art.gather_trajectories([worker_rollouts.chat(model, Note("a"))], workers=workers, pbar_desc=None)


class Pipelined:
    """The trained groups of a small pipeline."""

    def __init__(self, folder: Path, workers: RayWorkers | None) -> None:
        self.backend, self.workers = ScriptedBackend(folder), workers

    async def train(self, steps: int) -> list[Any]:
        pipeline = art.pipeline(
            self.backend.model(), scenarios=[{"id": f"s{index}"} for index in range(4)], workers=self.workers,
            rollout=worker_rollouts.context_rollout, rollouts_per_group=2, groups_per_step=2, max_staleness=0,
        )  # fmt: skip
        async for _ in pipeline.train(steps):
            pass
        return sorted(str(sorted(t.metadata.items())) for call in self.backend.calls for g in call.groups for t in g)


async def test_a_pipeline_with_workers_trains_the_same_and_goes_on_where_it_ended(
    workers: RayWorkers, tmp_path: Path
) -> None:
    here = await Pipelined(tmp_path / "here", None).train(4)
    resumed = Pipelined(tmp_path / "there", workers)
    await resumed.train(2)
    assert await resumed.train(4) == here
    assert len(here) == 4 * 2 * 2


async def test_a_worker_that_blocks_is_killed_when_its_rollout_is_late(
    workers: RayWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_workers, "CANCEL_TIMEOUT_S", 0.3)
    other = asyncio.create_task(workers.run(worker_rollouts.waits, 0.2))
    (late,) = await art.gather_trajectories(
        [worker_rollouts.fate(Note("a", "block"))], workers=workers, rollout_timeout_s=0.5, max_exceptions=1,
        pbar_desc=None,
    )  # fmt: skip
    assert isinstance(late, TimeoutError)
    assert (await other).reward == 1.0, "it shared the process, and runs again"
    assert await workers.run(worker_rollouts.length, "back") == 4
