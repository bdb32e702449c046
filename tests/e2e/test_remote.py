"""A server of its own and scripts that have the core package only: training, checkpoints, and a server that is killed."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import art
from art.storage import checkpoints
from art.testing.tiny_model import build_tiny_model
from benchmarks.remote_storm import KEY, Supervised, calm_run, compare, disturbed_run

ROOT = Path(__file__).parents[2]
CORE_ONLY = """
import runpy, sys
for name in ("torch transformers peft numpy safetensors tokenizers uvicorn uvloop httptools orjson aiohttp jinja2 rich "
             "matplotlib huggingface_hub boto3 fastapi").split():
    sys.modules[name] = None  # as if it were not installed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SHORT = """
import asyncio, runpy, sys
asyncio.run(runpy.run_path(sys.argv[1])["main"](sys.argv[2], "yes_no_maybe", num_steps=2))
"""
EXAMPLE = str(ROOT / "examples/remote/remote.py")


@dataclass
class Server:
    url: str
    key: str
    folder: Path


def run_script(server: Server, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CORE_ONLY, *command], cwd=folder, capture_output=True, text=True, timeout=900,
        env=os.environ | {"ART_SERVER_URL": server.url, "ART_API_KEY": server.key},
    )  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "server"
    folder.mkdir()
    server = Supervised(folder)
    yield Server(server.url, KEY, server.folder)
    server.close()


def test_a_script_with_the_core_package_trains_and_fetches(
    shared_backend: art.LocalBackend, tiny_model: Path, tmp_path: Path
) -> None:
    client = asyncio.run(shared_backend.open())
    server = Server(client.base_url, shared_backend._api_key, shared_backend.path)
    script = tmp_path / "script.py"
    script.write_text(SHORT)
    done = run_script(server, tmp_path, str(script), EXAMPLE, str(tiny_model))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d): maybe", done.stdout, re.MULTILINE) == ["1", "2"]
    assert (tmp_path / ".art/remote/models/agent-001/history.jsonl").is_file(), "the log is where the script runs"

    own, kept = (next(folder.rglob("remote/models/agent-001")) for folder in (tmp_path / ".art", server.folder))
    for name in ("history.jsonl", "trajectories/train/0001.jsonl"):
        assert (kept / name).read_bytes() == (own / name).read_bytes(), "the server's page has what the script logged"

    cli = str(Path(sys.modules["art"].__path__[0]) / "cli" / "main.py")

    def art_checkpoints(*words: str) -> str:
        done = run_script(server, tmp_path, cli, "checkpoints", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = art_checkpoints("list", "remote/agent-001", "--metric", "train/reward").splitlines()
    assert [line.split()[0] for line in listed] == ["step", "0", "1", "2"]
    assert "newest" in listed[-1]
    assert sum("best" in line for line in listed) == 1
    art_checkpoints("download", "remote/agent-001", "here", "--step", "1")
    checkpoints.verify(tmp_path / "here")
    assert "remote/second is at step 2" in art_checkpoints("fork", "remote/agent-001", "remote/second")
    assert "deleted 0" in art_checkpoints("delete", "remote/agent-001", "--keep", "1", "2", "--yes")


@pytest.mark.slow
def test_the_remote_example_of_the_readme_learns(
    server: Server, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = build_tiny_model(tmp_path_factory.mktemp("tiny") / "model", task="tic_tac_toe", seed=0)
    done = run_script(server, tmp_path, EXAMPLE, str(model))
    assert done.returncode == 0, done.stderr[-2000:]
    won = [int(value) for value in re.findall(r"win (\d+)%", done.stdout)]
    assert len(won) == 30
    assert sum(won[-5:]) / 5 > sum(won[:3]) / 3 + 15, won


@pytest.mark.slow
def test_kills_of_the_server_change_no_loss(tiny_model: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "kills", tmp_path / "calm"]
    for folder in folders:
        folder.mkdir()
    storm = disturbed_run(folders[0], tiny_model, 3, random.Random(1))
    assert storm.num_starts >= 4
    assert storm.breaches == []
    _, breaches = compare(storm, calm_run(folders[1], tiny_model, len(storm.losses)))
    assert breaches == []
