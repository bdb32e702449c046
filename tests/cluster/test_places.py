"""Several nodes of Ray on this machine: where `art doctor --cluster` finds room, and what a server tells of a lost node."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("art_cluster.ray_cluster", reason="Ray is not installed: `make test-cluster` does")

import ray
from ray.cluster_utils import Cluster

from art.config import EngineConfig, ModelSettings, ServerConfig, TrainerConfig
from art.protocol.live import ClusterPart
from art.storage.layout import DataDir
from art_cluster.ray_cluster import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
_SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head without processors and two nodes with one GPU each, which are numbers to Ray."""
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100_000_000, "_system_config": _SOON}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=100_000_000)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


async def test_each_gpu_is_given_once(nodes: Cluster, tmp_path: Path, tiny_model: Path) -> None:
    cluster = RayCluster(ServerConfig(cluster="ray"), DataDir(tmp_path))
    checks = {check.name: check for check in await cluster.examine(ModelSettings(), str(tiny_model))}
    assert [check.status for check in checks.values()] == ["ok"] * 4
    assert "3 nodes" in checks["cluster"].found
    assert "engine (0 CPU, 1 GPU) on" in checks["places"].found
    assert "trainer (0 CPU, 1 GPU) on" in checks["places"].found
    settings = ModelSettings(trainer=TrainerConfig(num_processes=2))
    refused = (await RayCluster(ServerConfig(cluster="ray"), DataDir(tmp_path)).examine(settings, None))[-1]
    assert refused.status == "failure"
    assert re.search(r"the (engine|trainer) finds no room .* 3 nodes with .* 2 GPU \(\d free\)", refused.found)


async def test_a_lost_node_is_shown(nodes: Cluster, tmp_path: Path) -> None:
    cluster = RayCluster(ServerConfig(cluster="ray"), DataDir(tmp_path))
    await cluster.open()
    try:
        assert [node.alive for node in ClusterPart(**cluster.status()).nodes] == [True] * 3
        await asyncio.to_thread(nodes.remove_node, next(iter(nodes.worker_nodes)), allow_graceful=False)
        async with asyncio.timeout(60):
            while sum(node.alive for node in ClusterPart(**cluster.status()).nodes) != 2:
                await asyncio.sleep(0.2)
    finally:
        await cluster.close()


async def test_without_gpus_of_its_own_a_model_can_take_processors(nodes: Cluster, tmp_path: Path) -> None:
    settings = ModelSettings(
        engine=EngineConfig(device="cpu", num_threads=1), trainer=TrainerConfig(device="cpu", num_threads=1)
    )
    places = (await RayCluster(ServerConfig(cluster="ray"), DataDir(tmp_path)).examine(settings, None))[-1]
    assert (places.name, places.status) == ("places", "ok")
    assert "engine (1 CPU, 0 GPU) on" in places.found
