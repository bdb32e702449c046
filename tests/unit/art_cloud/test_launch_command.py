"""`art launch` against a machine that is a folder of this one."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import art
from art.cli.main import main
from art_cloud.launch import Launched
from tests.support.fake_ssh import FakeMachine

LAUNCH = ("launch", "--host", "box", "--source", "art==1.2.3")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    machine = FakeMachine(tmp_path / "machine")
    monkeypatch.setenv("PATH", f"{machine.bin_dir}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ART_LAUNCHED_DIR", str(tmp_path / "launched"))
    yield machine
    machine.kill()


def test_a_server_is_launched_looked_at_stopped_and_taken_down(
    machine: FakeMachine, no_pauses: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "status"]) == 0
    assert "no server was launched" in capfd.readouterr().out
    assert main([*LAUNCH, "--model", "qwen3-0.6b"]) == 0
    printed = capfd.readouterr().out
    assert "art launch tunnel box" in printed
    url = re.search(r"export ART_SERVER_URL=(http://127.0.0.1:\d+)\n", printed)
    assert url is not None
    assert url[1] == Launched().find("box").url
    key = (machine.server_folder / "api.key").read_text()
    assert key not in printed
    assert Launched().key_path("box").read_text() == key
    assert '"models": ["qwen3-0.6b"]' in (machine.server_folder / "settings.json").read_text()

    assert main(["launch", "status"]) == 0
    assert re.search(rf"^box +ssh +box +running +{art.__version__} ", capfd.readouterr().out, re.MULTILINE)
    assert main(["launch", "logs", "box", "--lines", "1"]) == 0
    assert capfd.readouterr().out == "art-server listens\n"
    assert main(["launch", "stop"]) == 0
    assert "its data stays in ~/.art/servers/default/data on box" in capfd.readouterr().err
    assert machine.processes() == {}
    assert main(["launch", "status", "box"]) == 0
    assert " stopped " in capfd.readouterr().out
    machine.set_problem("ssh: connect to host box port 22: No route to host")
    assert main(["launch", "status"]) == 0
    assert "unknown: box cannot be reached over ssh" in capfd.readouterr().out
    machine.set_problem()
    assert main(["launch", "down", "box", "--delete-data"]) == 0
    assert not machine.server_folder.exists()
    assert Launched().names() == []
    assert main(["launch", "logs", "box"]) == 1
    assert "no server 'box' is launched" in capfd.readouterr().err


def test_a_launch_that_fails_is_recorded_and_can_be_taken_down(
    machine: FakeMachine, no_pauses: None, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.set_problem("ssh: connect to host box port 22: No route to host")
    assert main(list(LAUNCH)) == 1
    assert "ssh said: connect to host box port 22: No route to host" in capsys.readouterr().err
    assert Launched().names() == [], "nothing is there"
    machine.set_problem()
    machine.set_pip("ERROR: No matching distribution found\n", rc=1)
    assert main(list(LAUNCH)) == 1
    assert "`art launch down box` removes what this launch leaves on box\n" in capsys.readouterr().err
    assert main(["launch", "status"]) == 0
    assert re.search(r"^box +ssh +box +stopped ", capsys.readouterr().out, re.MULTILINE)
    machine.set_pip("fine\n")
    assert main(list(LAUNCH)) == 0
    key = Launched().key_path("box").read_text()
    machine.set_problem("ssh: connect to host box port 22: No route to host")
    assert main(list(LAUNCH)) == 1
    assert Launched().key_path("box").read_text() == key, "a later failure changes nothing"
    machine.set_problem()
    capsys.readouterr()
    assert main(["launch", "down"]) == 0
    assert capsys.readouterr().err.startswith("box: deleting ~/.art/servers/default, except its data\n")
    assert [path.name for path in machine.server_folder.iterdir()] == ["data"]


def test_data_that_was_left_can_still_be_deleted(machine: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(LAUNCH)) == 0
    (machine.server_folder / "data").mkdir(exist_ok=True)
    assert main(["launch", "down", "box"]) == 0
    said = capsys.readouterr().err
    assert (
        "its data stays in ~/.art/servers/default/data on box. `art launch down box --delete-data` deletes it" in said
    )
    assert main(["launch", "down", "box", "--delete-data"]) == 0
    assert capsys.readouterr().err.endswith("box is down\n")
    assert not machine.server_folder.exists()
    assert Launched().names() == []


@pytest.mark.slow
def test_a_tunnel_makes_a_server_reachable_at_its_recorded_address_and_starts_it(
    machine: FakeMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(LAUNCH)) == 0
    assert main(["launch", "stop"]) == 0
    url = Launched().find().url
    command = [sys.executable, "-m", "art.cli.main", "launch", "tunnel", "box"]
    tunnel = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert tunnel.stdout is not None
    assert any(f"ART_SERVER_URL={url}" in line for line in tunnel.stdout)
    key = Launched().key_path("box").read_text()
    assert httpx2.get(f"{url}/health", headers={"authorization": f"Bearer {key}"}).json()["is_known"] is True
    tunnel.send_signal(2)
    assert tunnel.wait() == 130
    tunnel.stdout.close()
    deadline = time.monotonic() + 60
    while machine.processes("-L") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert machine.processes("-L") == {}
    assert len(machine.processes("server.py")) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch"], "nothing says where; try `art launch --gpu H100:1`, or `art launch --cloud ssh --host"),
        (["launch", "--cloud", "ssh"], "--cloud ssh needs a machine: --host"),
        (["launch", "--host", "box", "--gpu", "H100:1"], "--gpu takes no value with --cloud ssh"),
        (["launch", "--host", "-oEvil"], "expected one argument"),
        (["launch", "--host", "box", "--spot"], "--spot is for machines that SkyPilot rents"),
    ],
)
def test_what_does_not_name_a_machine_is_refused(
    machine: FakeMachine, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with contextlib.suppress(SystemExit):  # of argparse
        assert main(words) == 1
    assert message in capsys.readouterr().err
    assert machine.calls() == []
