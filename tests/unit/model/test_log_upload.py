"""A server elsewhere gets what `model.log` writes here, and its own page shows the same."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx2
import pytest

import art
from art.backend import Backend
from art.runtime.model_checkpoints import append_once
from art.storage.layout import DataDir
from tests.support.fake_art_server import FakeArtServer, refusal


class Server(FakeArtServer):
    """Keeps logs in a directory of its own, as the real one does."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.logs: list[Any] = []
        self.log_trouble: list[httpx2.Response | None] = []

    def answer(self, request: httpx2.Request, body: Any) -> httpx2.Response:
        if not request.url.path.endswith("/log"):
            return super().answer(request, body)
        self.logs.append(body)
        paths = DataDir(self.folder).model("games", "agent")
        append_once(paths, body["split"], body["step"], body["row"], body["groups"])
        if self.log_trouble and (trouble := self.log_trouble.pop(0)) is not None:
            return trouble
        return httpx2.Response(200, json={"num_groups": len(body["groups"])})


class ElsewhereBackend(Backend):
    def __init__(self, server: FakeArtServer, data_dir: Path | None = None) -> None:
        super().__init__()
        self._client = server.client()
        self.data_dir = data_dir


async def registered(server: Server, base_path: Path, data_dir: Path | None = None) -> art.TrainableModel:
    model = art.TrainableModel(name="agent", project="games", base_model="base", base_path=str(base_path))
    await model.register(ElsewhereBackend(server, data_dir))
    return model


def groups(count: int, text: str = "what <b>he</b> said") -> list[art.TrajectoryGroup]:
    items = [{"role": "user", "content": text}]
    return [
        art.TrajectoryGroup(
            [art.Trajectory(messages_and_choices=items, reward=float(i), metadata={"explanation": "too long"})],
            metrics={"spread": float("nan")},
        )
        for i in range(count)
    ]  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    root = DataDir(folder).model("games", "agent").root
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*.jsonl")
        if "costs" not in path.name
    }


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "server")


async def test_the_server_has_the_same_files(server: Server, tmp_path: Path) -> None:
    model = await registered(server, tmp_path / "client")
    await model.log(groups(3), split="train", metrics={"note": 1}, step=2)
    await model.log(groups(1), split="val", step=2)
    await model.log(metrics={"loss/x": float("inf")}, split="train", step=3)
    own = files(tmp_path / "client")
    assert own == files(tmp_path / "server")
    assert {"history.jsonl", "trajectories/train/0002.jsonl", "trajectories/val/0002.jsonl"} == own.keys()


async def test_a_lost_answer_repeats_nothing(server: Server, tmp_path: Path) -> None:
    model = await registered(server, tmp_path / "client")
    server.log_trouble = [refusal(503, "process_error"), refusal(502, "process_error"), None]
    await model.log(groups(3), split="train", step=1)
    assert len(server.logs) == 3
    assert files(tmp_path / "client") == files(tmp_path / "server")


async def test_large_logs_come_in_parts(server: Server, tmp_path: Path) -> None:
    model = await registered(server, tmp_path / "client")
    await model.log(groups(5, "x" * 1_500_000), split="train", step=1)
    assert 3 <= len(server.logs) <= 5
    assert max(len(json.dumps(body["groups"])) for body in server.logs) < 8_000_000
    assert files(tmp_path / "client") == files(tmp_path / "server")


async def test_nothing_is_sent_to_a_server_that_has_the_files(server: Server, tmp_path: Path) -> None:
    model = await registered(server, tmp_path / "client", data_dir=tmp_path / "client")
    await model.log(groups(1), split="train", step=1)
    assert server.logs == []
    model = await registered(server, tmp_path / "client")
    model.backend().shares_log = False
    await model.log(groups(1), split="train", step=1)
    assert server.logs == []


async def test_a_script_in_the_directory_of_its_server_logs_once(server: Server, tmp_path: Path) -> None:
    model = await registered(server, server.folder)
    await model.log(groups(2), split="train", step=1)
    lines = {name: data.count(b"\n") for name, data in files(server.folder).items()}
    assert lines == {"history.jsonl": 1, "trajectories/train/0001.jsonl": 2}


async def test_a_server_that_refuses_does_not_stop_training(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = await registered(server, tmp_path / "client")
    too_large, not_known = refusal(413, "payload_too_large", "too large"), refusal(404, "not_found", "no route")
    server.log_trouble = [too_large, not_known]
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            await model.log(groups(1), split="train", step=step)
    assert len(server.logs) == 3
    assert "did not get 1 groups of step 1" in caplog.text
    assert "did not get 1 groups of step 2" in caplog.text
    assert len(files(tmp_path / "client")["history.jsonl"].splitlines()) == 3
