"""A running job is stopped when the data directory is gone, and a new one runs when it is back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from art.config import ServerConfig
from art.errors import StorageError
from art.runtime.runtime import Runtime
from art.runtime.supervision import directory_watch
from art.runtime.supervision.directory_watch import watch_directory


async def test_work_is_stopped_and_the_log_tells_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(directory_watch, "CHECK_EVERY_S", 0.01)
    stopped: list[StorageError] = []
    is_gone = False

    def check() -> None:
        if is_gone:
            raise StorageError("it is gone")

    watching = asyncio.create_task(watch_directory(check, stopped.append))
    await asyncio.sleep(0.05)
    assert stopped == []
    is_gone = True
    while len(stopped) < 3:
        await asyncio.sleep(0.01)
    is_gone = False
    while "is back" not in caplog.text:
        await asyncio.sleep(0.01)
    assert caplog.text.count("it is gone") == 1
    watching.cancel()


@pytest.mark.parametrize("name", ["art.db", "server.lock"])
async def test_a_server_that_lost_a_file_is_not_ready(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(tmp_path / "data", ServerConfig(min_free_bytes=0))
    await runtime.start()
    try:
        assert await runtime.obstacles() == {}
        (tmp_path / "data" / name).unlink()
        assert f"{name} in it was" in (await runtime.obstacles())["database"]
        async with asyncio.timeout(60):
            while f"{name} in it was" not in caplog.text:
                await asyncio.sleep(0.05)
    finally:
        await runtime.close()
