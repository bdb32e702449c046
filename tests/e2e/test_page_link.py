"""A training script prints a link to the live page: it opens once, and the server's log does not have it."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

import art
from art.server.app import App
from art.storage.local_key import find_local_key
from art_page.page import TrainingPage


async def test_the_link_of_a_training_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ART_API_KEY", raising=False)
    async with art.LocalBackend(path=tmp_path) as backend:
        client = await backend.open()
        await backend.open()
        error = capsys.readouterr().err
        (link,) = re.findall(r"http://127\.0\.0\.1:\d+/#login=\S+", error)
        base, code = link.split("/#login=")
        assert base == client.base_url
        assert f"art view {tmp_path}" in error
        assert client.api_key is not None
        assert client.api_key not in error
        headers = {"origin": base, "x-art-page": "1"}
        async with httpx2.AsyncClient(base_url=base, headers=headers, trust_env=False) as http:
            assert "page.js" in (await http.get("/")).text
            session = await http.post("/view/login", json={"code": code})
            assert session.json()["has_server"] is True
            assert (await http.get("/view/api/runs")).json()["runs"] == []
            assert (await http.get("/view/api/system")).status_code == 200
            assert (await http.post("/view/login", json={"code": code})).status_code == 401
        # `art view` of the same user finds the server and makes another one.
        assert find_local_key(base) == client.api_key
        command = [sys.executable, "-m", "art.cli.main", "view", str(tmp_path)]
        shown = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        (other,) = re.findall(r"http://127\.0\.0\.1:\d+/#login=\S+", shown.stdout)
        assert other.startswith(base)
        assert other != link
        kept = "".join(path.read_text(errors="replace") for path in (tmp_path / "logs").iterdir())
        assert code not in kept
        assert other.partition("=")[2] not in kept
    assert find_local_key(base) is None


async def test_nothing_is_printed_for_those_who_want_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with art.LocalBackend(path=tmp_path, show_page=False) as backend:
        await backend.open()
    assert capsys.readouterr().err == ""


def test_the_servers_own_link_opens_once(tmp_path: Path) -> None:
    app = App(None, api_key="key-of-the-operator", data_dir=tmp_path, pages=[TrainingPage])
    (page,) = app.pages
    assert isinstance(page, TrainingPage)
    link = page.greeting("http://[::1]:5000").split()[3]
    assert link.startswith("http://[::1]:5000/#login=")
    assert page.sessions.redeem(link.partition("=")[2]) == "server"
    app.close()
