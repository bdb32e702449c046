"""Five steps of tic-tac-toe at home, on one Ray node and on two, and with rollout workers: the same tokens and losses."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import art
from art.asynchronous.step import PipelineStep
from art.rollout_workers import Workers
from art.testing.tiny_model import build_tiny_model
from tests.cluster.test_nodes import status_of
from tests.cluster.test_one_node import processes_of
from tests.support.clusters import RayNodes, ray_nodes, registered, same, settings
from tests.support.shared_folder import made_once
from tests.support.worker_rollouts import one_game

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra cluster: make test-cluster"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
NUM_STEPS = 5


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayNodes]:
    """Two nodes: two engines, two ranks and four rollout workers fill them, and fit on neither alone."""
    with ray_nodes(tmp_path, 3, 2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows how to answer, and hardly how to win."""
    return made_once(
        tmp_path_factory, "player", lambda folder: build_tiny_model(folder, task="tic_tac_toe", warm_start_steps=100)
    )


@dataclass
class Training:
    steps: list[PipelineStep]
    machines: list[str]
    """Address and process id of whatever ran an engine or a rank."""

    @property
    def numbers(self) -> list[dict[str, float]]:
        return [{"reward": step.reward, **same(dict(step.metrics))} for step in self.steps]

    @property
    def games(self) -> list[list[str]]:
        groups = [group for step in self.steps for group in step.groups]
        return [[str(message["content"]) for message in one.messages()] for group in groups for one in group]


async def learn(
    folder: Path, player: Path, about: art.ModelSettings, *, cluster: str | None = None, workers: Workers | None = None
) -> Training:
    """Train one model, and check what holds wherever it is trained."""
    async with art.LocalBackend(path=folder, cluster=cluster, show_page=False) as backend:
        model = await registered(backend, player, about)
        pipeline = art.pipeline(
            model, scenarios=art.get_task("tic_tac_toe").scenarios("train", seed=0, count=10), rollout=one_game,
            rollouts_per_group=8, groups_per_step=2, max_staleness=0, workers=workers,
        )  # fmt: skip
        steps = [step async for step in pipeline.train(NUM_STEPS, learning_rate=3e-3)]
        engines, _ = await processes_of(backend)
        actors = (await status_of(backend))["actors"] if cluster else []
    assert [(step.number, step.trained) for step in steps] == [(number + 1, True) for number in range(NUM_STEPS)]
    for step in steps:
        dropped = sum(value for name, value in step.metrics.items() if name.startswith("ledger/dropped_tokens/"))
        assert step.metrics["ledger/sampled_tokens"] == step.metrics["ledger/trained_tokens"] + dropped > 0
        assert step.metrics["publish/probe_gap"] < 1e-4, "the largest of all replicas"
    for engine in engines:
        assert f"cluster/agent@{NUM_STEPS}" in engine["policies"], "each replica has passed the handshake"
        assert not engine["refused"]
    return Training(steps, [machine for actor in actors for machine in actor["machines"]])


async def test_the_same_games_train_the_same_wherever_engines_ranks_and_rollouts_run(
    cluster: RayNodes, player: Path, tmp_path: Path
) -> None:
    home = await learn(tmp_path / "home", player, settings())
    on_ray = {"one engine, one rank": await learn(tmp_path / "one", player, settings(), cluster="ray")}
    both: dict[str, Any] = {"about": settings(ranks=2, replicas=2), "cluster": "ray"}
    on_ray["two engines, two ranks"] = await learn(tmp_path / "two", player, **both)
    async with art.RayWorkers(4, cpus=0.25, concurrency=1) as workers:
        on_ray["and four rollout workers"] = await learn(tmp_path / "workers", player, **both, workers=workers)
    assert len({len(game) for game in home.games}) > 1, "games differ"
    for name, training in on_ray.items():
        assert training.games == home.games, f"{name}: one request at a time, with seeds: the same tokens"
        for there, here in zip(training.numbers, home.numbers, strict=True):
            # Float32 sums whose terms cancel to about 0; two ranks add them in another order. Seen: 1.1e-6.
            assert there == pytest.approx(here, abs=2e-6), name
    played_by = Counter(t.metadata["pid"] for step in training.steps for group in step.groups for t in group)
    assert len(played_by) == 4, "every worker has played"
    assert [len(training.machines) for training in on_ray.values()] == [2, 4, 4], "actors; four need both nodes"
