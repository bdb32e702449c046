"""A training that was stopped and goes on: its numbers are those of the history, and it remembers the evaluation."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx2
import pytest

import art
from art.client.client import ServerClient
from art.storage.jsonl import read_lines
from art.task import Scenario, Split, Task, TaskDefaults
from art.trajectory import Trajectory, TrajectoryGroup
from art_recipes.training.training_loop import StepReport, evaluate, logged_evaluation, step_to_report, train_task
from tests.support.fake_art_server import FakeArtServer
from tests.support.model_folder import paths_of

DEFAULTS = TaskDefaults(learning_rate=1e-3, groups_per_step=2, rollouts_per_group=2)


class Counted(Task):
    name = "counted"
    description = "earns the index of its rollout"
    headline_metric = "won"

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        return [self.scenario(split, seed, i, {}) for i in range(count)]

    async def rollout(
        self, model: Any, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        messages: Any = [{"role": "user", "content": scenario.id}, {"role": "assistant", "content": "1"}]
        return Trajectory(messages_and_choices=messages, reward=rollout_index, metrics={"won": rollout_index})


class CountingServer(FakeArtServer):
    def client(self, **options: Any) -> ServerClient:
        async def handle(request: httpx2.Request) -> httpx2.Response:
            await asyncio.sleep(0.01)  # as a real one, which lets other tasks run while it is asked
            return self.handle(request)

        return ServerClient("http://art.test", "key", transport=httpx2.MockTransport(handle), **options)

    def poll(self, job_id: str) -> httpx2.Response:
        answer = super().poll(job_id)
        self.jobs[job_id].metrics["ledger/sampled_tokens"] = 1000.0
        return self.json(self.jobs[job_id]) if answer.status_code == 200 else answer


@pytest.fixture
def server() -> CountingServer:
    return CountingServer()


async def registered(server: FakeArtServer, folder: Path) -> art.TrainableModel:
    backend = art.Backend()
    backend._client = server.client()
    model = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(folder))
    await model.register(backend)
    return model


async def test_steps_have_the_numbers_of_their_rows_and_no_speed_of_rollouts_from_before(
    server: CountingServer, tmp_path: Path
) -> None:
    """Ctrl-C while step 2 is trained: the server finishes it, and the next run logs it first."""
    model = await registered(server, tmp_path)
    reports: list[StepReport] = []

    def on_step(report: StepReport) -> None:
        reports.append(report)
        server.polls_until_done = 10**9  # the next step takes for ever

    async def train(on_step: Any) -> None:
        await train_task(model, Counted(), DEFAULTS, num_steps=4, seed=0, on_step=on_step)

    first = asyncio.create_task(train(on_step))
    while len(server.jobs) < 2 and not first.done():
        await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await step_to_report(model), [report.step for report in reports]) == (1, [1])
    server.polls_until_done = 1
    server.poll(list(server.jobs)[1])
    assert (await model.get_step(), await step_to_report(model)) == (2, 1), "the run said that it stopped at step 1"
    await train(reports.append)
    rows = [row["step"] for _, row in read_lines(paths_of(model).history) if row]
    assert [report.step for report in reports] == rows == [1, 2, 3, 4]
    assert [math.isnan(report.tokens_per_s) for report in reports] == [False, True, False, False]
    assert "tokens/s" not in reports[1].line("won")
    assert " left" not in reports[1].line("won"), "one step that took no time says nothing about the others"
    assert reports[2].line("won").endswith(" left")


async def test_a_step_that_is_not_trained_has_the_number_of_its_row(server: CountingServer, tmp_path: Path) -> None:
    model = await registered(server, tmp_path)
    reports: list[StepReport] = []

    def on_step(report: StepReport) -> None:
        reports.append(report)
        server.nothing_to_learn = len(reports) == 1

    await train_task(model, Counted(), DEFAULTS, num_steps=2, seed=0, on_step=on_step)
    rows = [row["step"] for _, row in read_lines(paths_of(model).history) if row]
    assert [report.step for report in reports] == rows == [1, 1, 2]
    assert "not trained, the model stays at checkpoint 1)" in reports[1].line("won")


async def test_an_evaluation_from_the_log(server: CountingServer, tmp_path: Path) -> None:
    model, task = await registered(server, tmp_path), Counted()
    assert logged_evaluation(model, task, step=0) is None
    ended: list[int] = []
    evaluation = await evaluate(model, task, count=3, seed=0, on_rollout=ended.append)
    assert ended == [1, 2, 3]
    await model.log(evaluation.trajectories, split="test", step=0)
    logged = logged_evaluation(model, task, step=0)
    assert logged is not None
    assert (logged.mean, logged.interval, logged.scores) == (evaluation.mean, evaluation.interval, evaluation.scores)
    groups = [
        TrajectoryGroup([Trajectory(metrics={"won": won})], metadata={"scenario_id": name})
        for name, won in [("a", 0), ("b", 1), ("a", 1)]
    ]
    await model.log(groups, split="test", step=7)
    again = logged_evaluation(model, task, step=7)
    assert again is not None
    assert again.scores == [("a", 0), ("b", 1), ("a", 1)], "all count, as on the page"
    without_ids = [Trajectory(metrics={"won": won}) for won in (0, 1, 1)]
    await model.log(without_ids, split="test", step=8)
    older = logged_evaluation(model, task, step=8)
    assert older is not None
    assert [value for _, value in older.scores] == [0, 1, 1]
    assert len({name for name, _ in older.scores}) == 3
