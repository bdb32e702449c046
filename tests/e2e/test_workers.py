"""`art worker`: engine and trainer run in programs that dial in, and training is the same."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import art
from art.config import ServerConfig
from art.worker.door import KEY_VARIABLE
from tests.support.clusters import free_port, registered, settings, train

pytest.importorskip("cryptography")


@contextlib.contextmanager
def worker(kind: str, port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{kind}-worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "art.cli.main", "worker", kind, "--server", f"127.0.0.1:{port}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_training_goes_on_when_a_worker_is_lost_and_another_one_dials_in(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a worker key for this test")
    port = free_port()
    config = ServerConfig(worker_address=f"127.0.0.1:{port}")
    with worker("trainer", port, tmp_path) as first, worker("engine", port, tmp_path):  # they wait for the server
        async with art.LocalBackend(
            path=tmp_path / "data", server_config=config, cluster="workers", show_page=False
        ) as backend:
            model = await registered(backend, tiny_model, settings())
            seen = await train(backend, model, 1)
            os.kill(first.pid, signal.SIGKILL)
            with worker("trainer", port, tmp_path):
                seen += await train(backend, model, 1)
    async with art.LocalBackend(path=tmp_path / "home", show_page=False) as backend:
        at_home = await train(backend, await registered(backend, tiny_model, settings()), 2)
    for there, here in zip(seen, at_home, strict=True):
        assert there == pytest.approx(here, abs=1e-6)
