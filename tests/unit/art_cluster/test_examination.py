"""What `art doctor --cluster` says of a Ray cluster, and what `art status` is told of one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from art.cli.main import build_parser
from art.config import EngineConfig, ModelSettings, ServerConfig, TrainerConfig
from art.errors import ConfigError
from art.protocol.live import ClusterPart
from art.runtime.placement import Devices, Gpu
from art.storage.layout import DataDir
from art.worker.door import own_versions
from art_recipes.doctor_command import run

pytest.importorskip("art_cluster.ray_cluster", reason="Ray is not installed: `make test-cluster` does")

import ray  # after art_cluster, which switches its token on

from art_cluster.examination import NodeReport, Place, check_room, check_software
from art_cluster.ray_cluster import RayCluster

GIB = 2**30
SETTINGS = ModelSettings(
    engine=EngineConfig(num_threads=1), trainer=TrainerConfig(num_processes=2, num_threads=1)
)  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """One node with three processors, which are numbers to Ray."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.init("local", num_cpus=3, include_dashboard=False, object_store_memory=100_000_000, logging_level="warning")
    yield RayCluster(ServerConfig(cluster="ray"), DataDir(tmp_path))
    ray.shutdown()


def node(versions: dict[str, str] | None = None, memory_bytes: int = 64 * GIB, *gpus: Gpu) -> NodeReport:
    devices = Devices(gpus=gpus, has_mps=False, memory_bytes=memory_bytes)
    return NodeReport("a (10.0.0.1)", own_versions() if versions is None else versions, devices)


async def test_engine_and_ranks_find_places(cluster: RayCluster, tiny_model: Path) -> None:
    found = {check.name: check for check in await cluster.examine(SETTINGS, str(tiny_model))}
    assert [check.status for check in found.values()] == ["ok"] * 4
    assert "1 nodes" in found["cluster"].found
    assert "3 CPU, 0 GPU free" in found["cluster"].found
    for name in ("engine", "rank 0 of the trainer", "rank 1 of the trainer"):
        assert f"{name} (1 CPU, 0 GPU) on " in found["places"].found
    assert "main memory of " in found["memory forecast"].found
    owners = [part.owner for part in found["memory forecast"].memory if part.name == "process"]
    assert owners == ["engine", "trainer", "trainer"]


async def test_what_does_not_fit_is_said_within_10_s(cluster: RayCluster) -> None:
    settings = SETTINGS.model_copy(update={"trainer": TrainerConfig(num_processes=5, num_threads=1)})
    begun = time.monotonic()
    places = (await cluster.examine(settings, None))[-1]
    assert time.monotonic() - begun < 10
    assert (places.name, places.status) == ("places", "failure")
    assert "the trainer finds no room on the Ray cluster: it needs 1 CPU + 1 CPU" in places.found
    assert "num_processes" in places.found


async def test_a_server_tells_its_nodes_and_the_object_store(cluster: RayCluster) -> None:
    await cluster.open()
    try:
        part = ClusterPart(**cluster.status())
        assert [(one.alive, one.resources) for one in part.nodes] == [(True, {"CPU": 3.0, "GPU": 0.0})]
        assert (part.free, part.num_lost, part.workers, part.actors) == ({"CPU": 3.0, "GPU": 0.0}, 0, [], [])
        kept = ray.put(b"x" * 20_000_000)
        async with asyncio.timeout(30):
            while (ClusterPart(**cluster.status()).store_used_bytes or 0) < 20_000_000:
                await asyncio.sleep(0.2)
        del kept
    finally:
        await cluster.close()


def test_a_node_with_other_versions_is_named() -> None:
    other = own_versions() | {"art": "0.0.1"}
    silent = NodeReport("b (10.0.0.2)", None, None, "No module named 'art_cluster'")
    check = check_software({"1": node(), "2": node(other), "3": silent})
    assert check.status == "failure"
    assert "a (10.0.0.1): art 0.0.1, here " in check.found
    assert "b (10.0.0.2): No module named 'art_cluster'" in check.found
    assert check_software({"1": node()}).status == "ok"


def test_each_gpu_is_forecast_for_what_it_would_hold(tiny_model: Path) -> None:
    small, large = Gpu("T", 64 * 2**20, "0"), Gpu("H", 80 * GIB, "1")
    places = [
        Place("engine", "engine", "n", {"GPU": 1.0}),
        Place("trainer", "rank 0 of the trainer", "n", {"GPU": 1.0}),
        Place("trainer", "rank 1 of the trainer", "new", {"GPU": 1.0}),
    ]
    check = check_room(places, {"n": node(None, 64 * GIB, small, large)}, SETTINGS, str(tiny_model))
    assert check.status == "warning"
    assert "GPU 0 (T) of a (10.0.0.1) needs" in check.found
    assert "are missing on GPU 0 (T) of a (10.0.0.1)" in str(check.remedy)
    parts = {(part.where, part.owner) for part in check.memory}
    assert parts == {
        ("GPU 0 (T) of a (10.0.0.1)", "engine"), ("GPU 1 (H) of a (10.0.0.1)", "trainer"),
        ("main memory of a (10.0.0.1)", "engine"), ("main memory of a (10.0.0.1)", "trainer"),
    }  # fmt: skip
    unknown = check_room(places, {"n": node()}, SETTINGS, "no/such-model")
    assert (unknown.status, "not forecast" in unknown.found) == ("ok", True)


def doctor(*words: str) -> int:
    return run(build_parser(["doctor"]).parse_args(["doctor", *words]))


def test_the_command_writes_what_it_found(cluster: RayCluster, tmp_path: Path, tiny_model: Path) -> None:
    settings, out = tmp_path / "settings.json", tmp_path / "out.json"
    settings.write_text(json.dumps({"settings": SETTINGS.model_dump(mode="json")}))
    assert doctor(str(tiny_model), "--cluster", "--settings", str(settings), "--json", str(out)) == 0
    assert [check["name"] for check in json.loads(out.read_text())["checks"]] == [
        "cluster", "software", "places", "memory forecast"
    ]  # fmt: skip


def test_a_cluster_that_does_not_answer_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at ray://127.0.0.1:9.*`ray start --head`"):
        doctor("--cluster", "ray://127.0.0.1:9")
    assert time.monotonic() - begun < 10
