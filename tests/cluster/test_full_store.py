"""An object store that is full: the error says what to do, nothing is lost, and work goes on when there is room."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import art
from art.config import LoraConfig
from art.errors import ArtError, StorageError
from art.protocol.calls import LoadAdapter
from tests.support.clusters import MEMORY_BYTES, RayNodes, ray_nodes, registered, settings, train

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra cluster: make test-cluster"),
    pytest.mark.slow,
]
NO_ROOM = r"no room for .*larger --object-store-memory or more disk"
DEADLINE_S = 20.0
"""For the chats of a step too, on a machine that is busy; alone, the error comes within 2 s."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    """A node whose object store does not spill to the disk, which counts as full too."""
    monkeypatch.setenv("RAY_automatic_object_spilling_enabled", "0")
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.0")
    with ray_nodes(tmp_path, 4) as cluster:
        yield cluster


@pytest.fixture
def ray(cluster: RayNodes) -> Iterator[Any]:
    import ray

    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


async def room(ray: Any, size_bytes: int) -> Any:
    """Wait until an object has room in the store of this machine's node: what was released leaves a little later."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(ray.exceptions.OutOfDiskError):
                return ray.put(b"x" * size_bytes)
            await asyncio.sleep(0.2)


def fill(ray: Any, leave_bytes: int) -> list[Any]:
    """Put objects into the store until there is room for `leave_bytes` only."""
    reserve = ray.put(b"x" * leave_bytes)
    kept, size = [], MEMORY_BYTES // 2
    while size >= 50_000:  # near the end each takes seconds
        try:
            kept.append(ray.put(b"x" * size))
        except ray.exceptions.OutOfDiskError:
            size //= 10
    del reserve
    return kept


@contextlib.asynccontextmanager
async def kept_full(ray: Any, leave_bytes: int) -> AsyncIterator[None]:
    """Fill the store, and again whenever an object of others has left it."""
    kept, done = fill(ray, leave_bytes), threading.Event()

    def refill() -> None:
        while not done.wait(0.02):
            with contextlib.suppress(ray.exceptions.OutOfDiskError):
                kept.extend(fill(ray, leave_bytes))

    refilling = asyncio.create_task(asyncio.to_thread(refill))
    try:
        yield
    finally:
        done.set()
        await refilling


async def test_a_step_that_finds_no_room_says_so_and_is_made_when_there_is_some(
    ray: Any, tiny_model: Path, tmp_path: Path
) -> None:
    about = settings().model_copy(update={"lora": LoraConfig(rank=256)})
    async with art.LocalBackend(path=tmp_path / "ray", cluster="ray", show_page=False) as backend:
        model = await registered(backend, tiny_model, about)
        seen = await train(backend, model, 1)
        began = []

        async def steps() -> None:
            for _ in range(10):  # a step may take the room of what the one before has released
                await asyncio.sleep(1)
                began.append(time.monotonic())
                seen.extend(await train(backend, model, 1))  # its chats are answered: tokens do not need the store

        async with kept_full(ray, leave_bytes=300_000):  # room for the samples, and not for the checkpoint of 8 MB
            with pytest.raises(ArtError, match=NO_ROOM) as raised:
                await steps()
            assert raised.value.code == "storage_error"
            assert time.monotonic() - began[-1] < DEADLINE_S
            assert await model.get_step() == len(seen)
        await room(ray, MEMORY_BYTES // 2)
        seen += await train(backend, model, 2)
    async with art.LocalBackend(path=tmp_path / "home", show_page=False) as backend:
        at_home = await train(backend, await registered(backend, tiny_model, about), len(seen))
    for there, here in zip(seen, at_home, strict=True):
        assert there == pytest.approx(here, abs=2e-6)


async def test_a_publish_that_finds_no_room_on_an_engines_node_says_so_and_goes_on(
    cluster: RayNodes, ray: Any, tmp_path: Path
) -> None:
    """The node has a store of its own; the file of the publish is larger than what is free there."""
    from art_cluster.files import RayFiles, SentFiles
    from art_cluster.worker_actor import WorkerActor

    class Filler:
        def fill(self, size: int) -> None:
            self.kept = ray.put(b"x" * size)

    cluster.add(2, resources={"engine": 2})
    there = {"num_cpus": 1, "resources": {"engine": 1}}
    filler = ray.remote(Filler).options(**there).remote()
    engine = ray.remote(WorkerActor).options(**there).remote("full-store")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    adapter.joinpath("weights").write_bytes(b"w" * (MEMORY_BYTES // 2))
    files = RayFiles([engine], await engine.root.remote(), SentFiles(None))
    call = LoadAdapter(name="p/m@1", path=adapter)
    await filler.fill.remote(int(MEMORY_BYTES * 0.7))
    started = time.monotonic()
    with pytest.raises(StorageError, match=NO_ROOM):
        await files.sent(call)
    assert time.monotonic() - started < DEADLINE_S
    ray.kill(filler)
    sent = await files.sent(call)
    assert (sent.path / "weights").read_bytes() == b"w" * (MEMORY_BYTES // 2)
    await engine.leave.remote()
