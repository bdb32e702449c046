"""`openpipe_art` as older articles print it: a server that was started without a key, a script that gives none."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from art.testing.judge import ScriptedJudge
from tests.e2e.test_remote import CORE_ONLY
from tests.support.ports import free_port

TRAIN = """
from openpipe_art import ArtClient

client = ArtClient(server_url="http://localhost:5000")
trajectory = client.run_agent(task="yes_no_maybe", prompt="Is it raining?")
print("said", trajectory.messages()[-1]["content"])
reports = client.train(iterations=1, groups=2, rollouts=4)
print("steps", [report.step for report in reports])
print("evaluated", client.evaluate("yes_no_maybe", count=4).n)
"""
JUDGE = """
import asyncio

from openpipe_art import ArtClient, ruler_score_group

client = ArtClient(server_url="http://localhost:5000")
trajectories = [client.run_agent(task="yes_no_maybe", index=index) for index in range(3)]
print("scores", [t.reward for t in ruler_score_group(trajectories, model="openai/o3")])


async def score_again():
    return await ruler_score_group(trajectories, model="openai/o3")


print("awaited", [t.reward for t in asyncio.run(score_again())])
reports = client.train(iterations=1, judge="openai/o3", groups=2, rollouts=2)
print("judged", [report.reward for report in reports])
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Without keys, and with a home of its own."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("ART_")}
    return given | {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state")), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, environment: dict[str, str]) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    command = [sys.executable, "-m", "art.cli.server", "--model", str(tiny_model), "--port", str(port)]
    with (folder / "output.txt").open("wb") as output:
        server = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)
    deadline = time.monotonic() + 60
    while f"listens on http://127.0.0.1:{port}" not in (said := (folder / "output.txt").read_text()):
        assert server.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
    yield port
    server.terminate()
    assert server.wait(60) == 0
    assert not list(Path(environment["XDG_STATE_HOME"]).rglob("*.key"))


def run_printed(script: str, port: int, folder: Path, environment: dict[str, str], *, core_only: bool) -> str:
    """The script with the server's port for 5000; what it printed."""
    path = folder / "script.py"
    path.write_text(script.replace("localhost:5000", f"localhost:{port}"))
    command = [sys.executable, *(["-c", CORE_ONLY] if core_only else []), str(path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_runs_and_trains_as_printed(port: int, tmp_path: Path, environment: dict[str, str]) -> None:
    printed = run_printed(TRAIN, port, tmp_path, environment, core_only=True)
    assert re.search(r"^said \S+", printed, re.MULTILINE)
    assert "steps [1]" in printed
    assert "evaluated 4" in printed


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="needs the extra rewards")
def test_it_judges_as_printed(port: int, tmp_path: Path, environment: dict[str, str]) -> None:
    """The judge that is named is a hosted one; its address is that of a local one here."""
    with ScriptedJudge(grade=lambda trajectory: 0.25) as judge:
        hosted = environment | {"OPENAI_BASE_URL": judge.base_url, "OPENAI_API_KEY": "none"}
        printed = run_printed(JUDGE, port, tmp_path, hosted, core_only=False)
    assert "scores [0.25, 0.25, 0.25]" in printed
    assert "awaited [0.25, 0.25, 0.25]" in printed
    assert "judged [0.25]" in printed
    assert judge.requests[0]["model"] == "o3"
