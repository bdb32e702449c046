"""`art launch` for machines that SkyPilot rents, against a fake of its program."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import art
from art.cli.main import main
from art.cli.output import duration
from art_cloud.launch import Launched
from tests.support.fake_sky import CLUSTER, FakeSky
from tests.support.fake_ssh import FakeMachine


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSky]:
    machine = FakeMachine(tmp_path / "machine")
    monkeypatch.setenv("PATH", f"{machine.bin_dir}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ART_LAUNCHED_DIR", str(tmp_path / "launched"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield FakeSky(machine)
    machine.kill()


def test_a_dry_run_shows_the_task_file_and_rents_nothing(sky: FakeSky, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "H100:1", "--cloud", "aws", "--region", "us-east-1", "--spot", "--idle", "2h"]
    assert main(["launch", *words, "--source", "art==1.2.3", "--name", CLUSTER, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for line in (
        '"infra": "aws/us-east-1",',
        '"accelerators": "H100:1",',
        '"use_spot": true,',
    ):
        assert f"    {line}\n" in printed
    assert "-mmin -115 " in printed
    assert sky.calls("launch") == []
    assert sky.clusters() == {}
    assert Launched().names() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "--cloud", "aws"], "--gpu needs the kind and number"),
        (["--cloud", "aws", "--host", "box"], "--host is for machines that ssh reaches"),
        (["--cloud", "ssh", "--host", "box", "--spot"], "--spot is for machines that SkyPilot rents"),
        (["--gpu", "H100:1", "--region", "us-east-1"], "needs its cloud"),
        (["--spot"], "try `art launch --gpu H100:1`"),
    ],
)
def test_options_that_contradict_are_refused(
    sky: FakeSky, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["launch", *words]) == 1
    assert said in capsys.readouterr().err
    assert sky.calls("launch") == []


def test_times_are_read() -> None:
    assert [duration(text) for text in ("45s", "30m", "2h", "1d")] == [45, 1800, 7200, 86400]


@pytest.mark.slow  # seconds of CPU: some thirty processes
def test_a_machine_is_launched_looked_at_and_taken_down(sky: FakeSky, capfd: pytest.CaptureFixture[str]) -> None:
    launch = ["launch", "--cloud", "lambda", "--source", "art==1.2.3", "--name", CLUSTER]
    assert main(launch) == 0
    printed = capfd.readouterr().out
    assert f"art launch tunnel {CLUSTER}" in printed
    assert Launched().key_path(CLUSTER).read_text() not in printed
    assert main(["launch", "status"]) == 0
    row = capfd.readouterr().out.splitlines()[1]
    assert re.match(
        rf"{CLUSTER} +skypilot +{CLUSTER} +running; UP on Lambda us-west-3 .*H100:1.* +{art.__version__} ", row
    )
    assert main(["launch", "logs"]) == 0
    assert "art-server listens" in capfd.readouterr().out
    (sky.machine.server_folder / "data" / "art.db").touch()
    assert main(["launch", "down"]) == 0
    assert "is down; its data stays in" in capfd.readouterr().err
    assert sky.clusters() == {}
    assert main(["launch", "down", "--delete-data"]) == 0
    assert main(["launch", "status"]) == 0
    assert "no server was launched" in capfd.readouterr().out
