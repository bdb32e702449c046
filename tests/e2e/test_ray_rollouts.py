"""Rollouts in workers of a Ray cluster, against a real server: recorded, trained and resumed as those of the script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import art
from art_cluster.ray_workers import RayWorkers
from tests.support.clusters import ray_in_this_process
from tests.support.worker_rollouts import captured_yes_no, yes_no

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'agent-reinforcement-trainer[cluster]'")
pytestmark = pytest.mark.slow
SCENARIOS = art.get_task("yes_no_maybe").scenarios("train", seed=0, count=6)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_in_this_process():
        yield


async def make_model(backend: art.LocalBackend, base_model: Path, name: str) -> art.TrainableModel:
    model = art.TrainableModel(name=name, project="rays", base_model=str(base_model), report_metrics=[])
    await model.register(backend)
    return model


async def test_a_pipeline_with_workers_samples_and_trains_what_one_without_does(
    shared_backend: art.LocalBackend, tiny_model: Path
) -> None:
    seen = []
    async with RayWorkers(2, cpus=0.5) as workers:
        for name, pool in (("here", None), ("there", workers)):
            model = await make_model(shared_backend, tiny_model, name)
            pipeline = art.pipeline(
                model, scenarios=SCENARIOS, rollout=yes_no, rollouts_per_group=4, groups_per_step=2, max_staleness=0,
                workers=pool,
            )  # fmt: skip
            seen.append([step async for step in pipeline.train(3, learning_rate=1e-3)])
    here, there = seen
    texts = [[t.messages()[-1]["content"] for step in run for group in step.groups for t in group] for run in seen]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3 * 2 * 4
    losses = [[step.metrics["loss/train"] for step in run] for run in seen]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    for step in there:
        dropped = sum(value for name, value in step.metrics.items() if name.startswith("ledger/dropped_tokens/"))
        assert step.metrics["ledger/sampled_tokens"] == step.metrics["ledger/trained_tokens"] + dropped
    assert [step.number for step in here] == [step.number for step in there] == [1, 2, 3]


async def test_captured_rollouts_of_workers_are_recorded_and_trained(
    shared_backend: art.LocalBackend, tiny_model: Path
) -> None:
    model = await make_model(shared_backend, tiny_model, "captured")
    async with RayWorkers(1, cpus=0.5) as workers:
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(captured_yes_no(model, one, i) for i in range(4)) for one in SCENARIOS[:3]),
            workers=workers, pbar_desc=None,
        )  # fmt: skip
    assert [len(group) for group in groups] == [4, 4, 4]
    for group in groups:
        for trajectory in group:
            recorded = await model.get_rollout(str(trajectory.metadata["rollout_id"]))
            assert recorded.messages() == trajectory.messages()
    result = await model.train(groups, learning_rate=1e-3)
    assert result.trained
    assert result.metrics["ledger/sampled_tokens"] > 0
