"""`art view`: the page about a folder."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from art.cli.main import main
from art.errors import NotFoundError
from art.storage.layout import DataDir
from art.storage.lock import DirectoryLock
from art_page import command as view
from tests.support.logged_run import log_run


@pytest.fixture
async def data_dir(tmp_path: Path) -> Path:
    await log_run(tmp_path / ".art", steps=2, groups=1)
    return tmp_path / ".art"


def test_a_folder_that_is_none(tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "nowhere")]) == 1
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert main(["view", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "neither art.db nor a folder PROJECT/models/NAME" in error
    assert f"did you mean {data_dir}?" in error
    assert main(["view", str(tmp_path.parent)]) == 1  # a folder of several, as `art demo` makes
    assert f"did you mean {data_dir}?" in capsys.readouterr().err
    (tmp_path / "notes").write_text("a file")
    assert main(["view", str(tmp_path / "notes")]) == 1
    assert "is a file, not a folder" in capsys.readouterr().err


def test_a_server_that_runs_on_the_folder_shows_its_own_page(
    data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, lock = DataDir(data_dir), DirectoryLock(DataDir(data_dir).lock)
    place.address.parent.mkdir()
    place.address.write_text("http://127.0.0.1:5123")
    served: list[str] = []
    monkeypatch.setattr(view, "serve_files", lambda data_dir, *options: served.append(data_dir.root.name) or 0)

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
