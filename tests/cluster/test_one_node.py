"""A Ray cluster of one node: the same training as without it, and what is said when something is not there."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import art
from art.config import EngineConfig, ServerConfig, TrainerConfig
from art.errors import ConfigError
from tests.support.clusters import RayNodes, ray_nodes, registered, settings, train

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the extra cluster: make test-cluster"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    with ray_nodes(tmp_path_factory.mktemp("cluster"), 4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def at_home(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Three steps on this machine, by one engine and one process."""

    async def run() -> list[dict[str, float]]:
        async with art.LocalBackend(path=tmp_path_factory.mktemp("home"), show_page=False) as backend:
            return await train(backend, await registered(backend, tiny_model, settings()), 3)

    return asyncio.run(run())


async def test_two_ranks_and_two_engines_train_what_one_process_trains(
    cluster: RayNodes, tiny_model: Path, tmp_path: Path, at_home: list[dict[str, float]]
) -> None:
    async with art.LocalBackend(path=tmp_path, cluster="ray", show_page=False) as backend:
        model = await registered(backend, tiny_model, settings(ranks=2, replicas=2))
        seen = await train(backend, model, 2)
        engines, trainer = await processes_of(backend)
        assert [engine["state"] for engine in engines] == ["up", "up"]
        os.kill(trainer["pid"], signal.SIGKILL)  # the actor of the first rank
        os.kill(engines[1]["pid"], signal.SIGKILL)  # that of an engine
        seen += await train(backend, model, 1)
        engines, trainer = await processes_of(backend)
        assert trainer["restarts"] == 1
        assert engines[1]["restarts"] == 1
        assert (tmp_path / "cluster" / "models" / "agent" / "checkpoints" / "0003").is_dir()
    for there, here in zip(seen, at_home, strict=True):
        assert there == pytest.approx(here, abs=2e-6)  # as in test_same_training.py


async def test_files_by_a_common_folder_and_as_many_engines_as_there_is_room_for(
    cluster: RayNodes, tiny_model: Path, tmp_path: Path, at_home: list[dict[str, float]]
) -> None:
    common = tmp_path / "common"
    config = ServerConfig(cluster="ray", cluster_files=str(common))
    async with art.LocalBackend(path=tmp_path / "data", server_config=config, show_page=False) as backend:
        model = await registered(backend, tiny_model, settings(replicas="auto"))
        seen = await train(backend, model, 2)
        engines, _ = await processes_of(backend)
        assert len(engines) == 3  # of four processors the trainer has one
        assert any(file.name == "adapter_model.safetensors" for file in common.rglob("*"))
    assert not list(common.rglob("*"))[1:]  # the server's folder goes with it
    for there, here in zip(seen, at_home, strict=False):
        assert there == pytest.approx(here, abs=2e-6)  # as in test_same_training.py


GPUS = art.ModelSettings(engine=EngineConfig(device="cuda"), trainer=TrainerConfig(device="cuda"))


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (settings(ranks=7), r"needs 1 CPU \+ 1 CPU .* 4 CPU \(\d free\).*`num_processes`"),
        (GPUS, r"needs 1 GPU, each on one node; there are 1 nodes with 4 CPU"),
    ],
    ids=["CPUs", "GPUs"],
)
async def test_what_finds_no_room_says_so(
    asked: art.ModelSettings, problem: str, cluster: RayNodes, tiny_model: Path, tmp_path: Path
) -> None:
    async with art.LocalBackend(path=tmp_path, cluster="ray", show_page=False) as backend:
        await backend.open()
        started = time.monotonic()
        with pytest.raises(ConfigError, match=problem):
            await registered(backend, tiny_model, asked)
        assert time.monotonic() - started < 10 + 15, "the wait for room, on a machine that is busy"


OTHER_TORCH = """
from importlib import metadata
real = metadata.version
metadata.version = lambda name: "1.0" if name == "torch" else real(name)
"""


async def test_nodes_of_another_version_are_named_at_once(
    cluster: RayNodes, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_TORCH)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))  # of the server alone
    async with art.LocalBackend(path=tmp_path / "data", cluster="ray", show_page=False) as backend:
        started = time.monotonic()
        with pytest.raises(
            ConfigError, match=r"cannot run on its node.*other versions: torch [\d.]+ there and 1\.0 here"
        ):
            await registered(backend, tiny_model, settings())
        assert time.monotonic() - started < 60, "not the time that a start may take, which is ten minutes"


def test_another_token_is_told_within_ten_seconds(cluster: RayNodes, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("c" * 64)
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", "from art_cluster.connect import connect; connect(None)"],
        capture_output=True, text=True, timeout=60, env=os.environ | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")},
    )  # fmt: skip
    assert "cannot use the Ray cluster" in ended.stderr
    assert "compare this machine's token (~/.ray/auth_token, RAY_AUTH_TOKEN)" in ended.stderr
    assert time.monotonic() - started < 20, "Ray itself tries for half a minute"


@pytest.mark.parametrize(
    ("address", "problem"),
    [("ray://127.0.0.1:1", "no Ray cluster answers at ray://127.0.0.1:1"), ("moon", "there is no cluster 'moon'")],
)
def test_a_cluster_that_is_not_there(tmp_path: Path, address: str, problem: str) -> None:
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "art.cli.server", "--cluster", address, "--port", "0", "--data-dir", str(tmp_path)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1
    assert problem in ended.stderr
    assert time.monotonic() - started < 20


async def test_a_node_that_comes_later_gives_room(cluster: RayNodes, tiny_model: Path, tmp_path: Path) -> None:
    config = ServerConfig(cluster="ray", room_timeout_s=120.0)
    async with art.LocalBackend(path=tmp_path, server_config=config, show_page=False) as backend:
        registering = asyncio.create_task(registered(backend, tiny_model, settings(ranks=5)))
        await asyncio.sleep(1)
        client = await backend._connection()
        async with asyncio.timeout(60):
            while True:
                (trainer,) = [one for one in await actors_of(client) if one["name"].startswith("trainer")] or [None]
                if trainer and trainer["problem"]:
                    break
                await asyncio.sleep(0.2)
        assert "needs 1 CPU + 1 CPU + 1 CPU + 1 CPU + 1 CPU, each on one node" in trainer["problem"]
        node = await asyncio.to_thread(cluster.add, 2)
        try:
            await registering
        finally:
            cluster.nodes.remove(node)
            node.kill()


async def actors_of(client: Any) -> list[dict[str, Any]]:
    return json.loads(await client.request("GET", "/health"))["cluster"]["actors"]


async def processes_of(backend: art.LocalBackend) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    client = await backend._connection()
    (host,) = json.loads(await client.request("GET", "/health"))["base_models"]
    return host["replicas"], host["trainer"]
