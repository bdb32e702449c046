"""The books that a host keeps of the adapters in its engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import art.runtime.host
from art.config import EngineConfig, ModelSettings, ServerConfig
from art.errors import ProcessError, TrainingError
from art.runtime.host import BaseModelHost
from art.runtime.hosts import Hosts
from art.runtime.registry import RegisteredModel
from art.storage import checkpoints
from art.storage.layout import DataDir


class Connection:
    """An engine that answers `unload_adapter` when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = asyncio.Event()
        self.dead = False

    async def call(self, method: str, *, name: str) -> None:
        self.asked.append(name)
        await self.answer.wait()
        if self.dead:
            raise ProcessError("the engine died")


@pytest.fixture
def engine() -> Connection:
    return Connection()


@pytest.fixture
def host(tmp_path: Path, engine: Connection, monkeypatch: pytest.MonkeyPatch) -> BaseModelHost:
    """Room for one adapter. The content of a checkpoint is its file `content`."""
    host = BaseModelHost("base", ModelSettings(), DataDir(tmp_path), ServerConfig())
    published: list[str] = []

    async def publish(_: Any, adapter_id: str, checkpoint: Path, tolerance: float | None) -> dict[str, float]:
        published.append(adapter_id)
        return {"publish/number": len(published)}

    async def connect() -> Connection:
        return engine

    monkeypatch.setattr(art.runtime.host, "MAX_LOADED_ADAPTERS", 1)
    monkeypatch.setattr(art.runtime.host, "publish", publish)
    monkeypatch.setattr(art.runtime.host.checkpoints, "identify", lambda path: (path / "content").read_text())
    monkeypatch.setattr(host.engine_process, "connect", connect)
    return host


def checkpoint(tmp_path: Path, name: str, content: str) -> Path:
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "content").write_text(content)
    return tmp_path / name


async def test_a_long_request_of_an_old_adapter_does_not_keep_new_ones_out(
    host: BaseModelHost, engine: Connection, tmp_path: Path
) -> None:
    async with asyncio.timeout(5):
        for name in ("a", "b", "c"):
            assert await host.load(name, checkpoint(tmp_path, name, name))
        await asyncio.sleep(0)
    assert engine.asked == ["a", "b"]
    assert [host.is_loaded(name) for name in ("a", "b", "c")] == [False, False, True]


async def test_full_checkpoints_make_room_before_they_are_loaded(
    host: BaseModelHost, engine: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(art.runtime.host, "MAX_LOADED_FULL", 2)
    seen: list[list[str]] = []

    async def publish(_: Any, adapter_id: str, path: Path, tolerance: float | None) -> dict[str, float]:
        await asyncio.sleep(0)
        seen.append(list(engine.asked))
        return {"publish/number": 1}

    monkeypatch.setattr(art.runtime.host, "publish", publish)
    assert await host.load("lora", checkpoint(tmp_path, "lora", "lora"))
    for name in ("a", "b", "c", "b"):
        path = checkpoint(tmp_path, name, f"{name}{len(seen)}")
        (path / checkpoints.MODEL_WEIGHTS).touch()
        assert await host.load(name, path)
    assert seen == [[], [], [], ["a"], ["a"]], "b was loaded again, in its own place"
    assert [host.is_loaded(name) for name in ("lora", "a", "b", "c")] == [True, False, True, True]


async def test_other_weights_under_the_same_name_are_published_again(host: BaseModelHost, tmp_path: Path) -> None:
    assert await host.load("a", checkpoint(tmp_path, "0001", "of a step that failed"))
    assert await host.load("a", checkpoint(tmp_path, "0001", "of a step that failed")) == {}
    assert await host.load("a", checkpoint(tmp_path, "0001", "of the next try"))


async def test_hosts_do_not_share_a_log(tmp_path: Path) -> None:
    hosts = Hosts(DataDir(tmp_path), ServerConfig())
    for number, base_model in enumerate(("org/base", "other/base", "org/base")):
        settings = ModelSettings(engine=EngineConfig(max_running=1 + number))
        hosts.of(RegisteredModel(project="p", name=f"m{number}", base_model=base_model, settings=settings, step=0))
    logs = [process.spec.log_path.name for process in hosts.processes()]
    assert logs[::2] == ["engine-base.log", "engine-base-2.log", "engine-base-3.log"]
    assert len(set(logs)) == 6


async def test_a_step_that_takes_too_long_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = BaseModelHost("base", ModelSettings(), DataDir(tmp_path), ServerConfig(job_timeout_s=0.1))
    ended: list[str] = []

    class Endless:
        async def stream(self, method: str, **params: Any) -> AsyncIterator[dict[str, Any]]:
            while True:
                yield {"progress": {}}
                await asyncio.sleep(0.01)

    async def connect() -> Endless:
        return Endless()

    async def end(cause: str) -> None:
        ended.append(cause)

    monkeypatch.setattr(host.trainer_process, "connect", connect)
    monkeypatch.setattr(host.trainer_process, "end", end)
    with pytest.raises(TrainingError, match=r"`train` took longer than `job_timeout_s` = 0\.1 s"):
        await host.train("train", job_id="x")
    assert len(ended) == 1


async def test_forgetting_waits_for_the_last_request_and_survives_the_engine(
    host: BaseModelHost, engine: Connection, tmp_path: Path
) -> None:
    await host.load("a", checkpoint(tmp_path, "a", "a"))
    forgetting = asyncio.ensure_future(host.forget_adapter("a"))
    await asyncio.sleep(0.01)
    assert not forgetting.done()
    assert not host.is_loaded("a")
    engine.dead = True
    engine.answer.set()
    await forgetting
    assert engine.asked == ["a"], "not repeated: the name may have been loaded again"
