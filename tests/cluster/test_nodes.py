"""Several raylets: ranks and engines on different nodes, and nodes that come and go."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import art
from tests.cluster.test_one_node import processes_of
from tests.support.clusters import RayNodes, ray_nodes, registered, settings, train

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra cluster: make test-cluster"),
    pytest.mark.slow,
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayNodes]:
    with ray_nodes(tmp_path, 0, 2, 2) as cluster:
        yield cluster


async def test_ranks_and_engines_on_two_nodes_train_what_one_process_trains(
    cluster: RayNodes, tiny_model: Path, tmp_path: Path
) -> None:
    async with art.LocalBackend(path=tmp_path / "home", show_page=False) as backend:
        at_home = await train(backend, await registered(backend, tiny_model, settings()), 4)
    async with art.LocalBackend(path=tmp_path / "ray", cluster="ray", show_page=False) as backend:
        model = await registered(backend, tiny_model, settings(ranks=2, replicas=2))
        seen = await train(backend, model, 2)
        actors = (await status_of(backend))["actors"]
        trainer = next(actor for actor in actors if actor["name"].startswith("trainer"))
        assert len(trainer["machines"]) == 2
        cluster.nodes.pop().kill()  # with a rank, or with the engine
        cluster.add(2)
        seen += await train(backend, model, 2)
        engines, trainer = await processes_of(backend)
        assert sum(process["restarts"] for process in [*engines, trainer]) >= 1
    for there, here in zip(seen, at_home, strict=True):
        assert there == pytest.approx(here, abs=2e-6)  # as in test_same_training.py


async def status_of(backend: art.LocalBackend) -> dict:
    client = await backend._connection()
    cluster: dict = json.loads(await client.request("GET", "/health"))["cluster"]
    return cluster
