"""`art view`: the page about a folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from art.cli.main import main
from art.errors import NotFoundError
from art.storage.layout import DataDir
from art.storage.lock import DirectoryLock
from art_page import command as view
from art_page.page import PATHS
from tests.support.logged_run import log_run


@pytest.fixture
async def data_dir(tmp_path: Path) -> Path:
    await log_run(tmp_path / ".art", steps=2, groups=1)
    return tmp_path / ".art"


def test_a_folder_that_is_none(tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "nowhere")]) == 1
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["view", str(data_dir), str(tmp_path / "empty")]) == 1
    assert "neither art.db nor a folder PROJECT/models/NAME" in capsys.readouterr().err
    (tmp_path / "notes").write_text("a file")
    assert main(["view", str(tmp_path / "notes")]) == 1
    assert "is a file, not a folder" in capsys.readouterr().err


def test_answers_for_programs(data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = "runs/games/agent"
    assert main(["view", str(data_dir), "--read", "runs"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["num_rollouts"] == 12, "it waits for the index"
    file = tmp_path / "answer.json"
    assert main(["view", str(data_dir), "--json", str(file)]) == 0
    assert json.loads(file.read_text())["runs"][0]["name"] == "agent"
    assert (
        main(["view", str(data_dir), "--read", f"/{run}/rollouts?split=train&step=2&limit=1", "--json", str(file)]) == 0
    )
    assert capsys.readouterr().out == ""
    rollouts = json.loads(file.read_text())
    assert (rollouts["total"], len(rollouts["rows"])) == (4, 1)
    for path, message in (
        ("runs/games/nobody", "nobody"),
        (f"{run}/nothing", PATHS[-1].path),
        (f"{run}/rollouts?colour=red", "colour"),
        (f"{run}/rollouts?limit=many", "limit"),
        ("runs/../etc", "project"),
        ("runs/%2e%2e/etc", "project"),
        (f"{run}/steps/two", "step"),
    ):
        assert main(["view", str(data_dir), "--read", path]) == 1
        assert message in capsys.readouterr().err


def test_a_server_that_runs_on_the_folder_shows_its_own_page(
    data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, lock = DataDir(data_dir), DirectoryLock(DataDir(data_dir).lock)
    place.address.parent.mkdir()
    place.address.write_text("http://127.0.0.1:5123")
    served: list[str] = []
    monkeypatch.setattr(view, "serve_files", lambda dirs, *options: served.append(dirs[0].root.name) or 0)

    async def link(url: str, key: str | None) -> str:
        return f"{url}/#login=once"

    monkeypatch.setattr(view, "_link", link)
    assert main(["view", str(data_dir)]) == 0  # the address is of a server that has ended
    assert served == [".art"]
    lock.acquire(0)
    try:
        assert main(["view", str(data_dir)]) == 0
        assert "http://127.0.0.1:5123/#login=once" in capsys.readouterr().out
        assert len(served) == 1
        assert main(["view", str(data_dir), "--port", "0"]) == 0  # who names a port wants the files
        assert len(served) == 2

        place.address.write_text("http://elsewhere.example:5123")
        assert main(["view", str(data_dir)]) == 0
        assert "art view --url http://elsewhere.example:5123" in capsys.readouterr().out
        assert len(served) == 3, "no key goes to an address that a file names"
        place.address.write_text("http://127.0.0.1:5123")

        async def refuse(url: str, key: str | None) -> str:
            raise NotFoundError("no page here")

        monkeypatch.setattr(view, "_link", refuse)
        assert main(["view", str(data_dir)]) == 0
        assert "showing the files instead" in capsys.readouterr().out
        assert len(served) == 4
    finally:
        lock.release()


async def test_several_folders_and_a_folder_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("demo/run-a", "demo/run-b", "other"):
        await log_run(tmp_path / name, steps=2, groups=1)
    capsys.readouterr()

    def shown(*words: str) -> dict[str, Any]:
        assert main(["view", *words]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    runs = shown(str(tmp_path / "demo"), str(tmp_path / "other"), "--read", "runs")["runs"]
    assert sorted(run["name"] for run in runs) == ["agent.other", "agent.run-a", "agent.run-b"]
    first, demo = runs[0]["project"], str(tmp_path / "demo")
    detail = shown(demo, "--read", f"runs/{first}/agent.run-b")
    assert (detail["name"], detail["step"]) == ("agent.run-b", 2)
    alone = shown(str(tmp_path / "demo/run-b"), "--read", f"runs/{first}/agent")
    for own in (detail, alone):
        own["name"] = own["updated_at"] = None
    assert detail == alone, "beside others a run is what it is alone"
    series = shown(demo, "--read", f"runs/{first}/agent.run-a/series?metric=train/reward&last=1")["series"]
    assert series[0]["steps"] == [1]
    assert main(["view", demo, "--read", f"runs/{first}/agent"]) == 1
    assert "there is no run" in capsys.readouterr().err
    assert main(["view", demo, "--read", "nothing/here"]) == 1
    assert "runs/{project}/{name}/series" in capsys.readouterr().err


def test_a_port_is_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "--url", "http://x:1", "--port", "3"]) == 1
    assert "leave it out" in capsys.readouterr().err


def test_the_page_is_served_until_ctrl_c(data_dir: Path) -> None:
    command = [sys.executable, "-m", "art.cli.main", "view", str(data_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert "files only" in process.stdout.readline()
        link = process.stdout.readline().strip()
        base, code = link.split("/#login=")
        headers = {"origin": base, "x-art-page": "1"}
        with httpx2.Client(base_url=base, headers=headers, trust_env=False) as http:
            assert http.get("/view/api/runs").status_code == 401
            assert "page.js" in http.get("/").text
            assert http.post("/view/login", json={"code": code}).status_code == 200
            assert http.get("/view/api/runs").json()["runs"][0]["name"] == "agent"
            assert http.get("/view/api/session").json()["has_server"] is False
            assert http.get("/view/api/runs", headers={"host": "evil.example"}).status_code in (401, 403)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)
    assert process.returncode == 0
    assert process.stderr.read() == ""
