"""`art launch` for machines that SkyPilot rents, against a fake of its program."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from art.backends.skypilot import sky_tool
from art.backends.skypilot.records import make_record
from art.backends.skypilot.sky_config import SkyConfig
from art.backends.ssh.launched import Launched
from art.cli.launching.sky_kind import idle_minutes
from art.cli.main import main
from tests.support.fake_sky import CLUSTER, FakeSky
from tests.support.fake_ssh import FakeMachine


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSky]:
    machine = FakeMachine(tmp_path / "machine")
    monkeypatch.setenv("PATH", f"{machine.bin_dir}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ART_LAUNCHED_DIR", str(tmp_path / "launched"))
    monkeypatch.chdir(tmp_path)
    yield FakeSky(machine)
    machine.kill()


def test_a_dry_run_shows_the_task_file_and_rents_nothing(sky: FakeSky, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "H100:1", "--cloud", "aws", "--region", "us-east-1", "--spot", "--idle", "2h", "--disk", "500"]
    words += ["--nodes", "2"]
    assert main(["launch", *words, "--source", "art==1.2.3", "--name", CLUSTER, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for line in (
        '  infra: "aws/us-east-1"',
        '  accelerators: "H100:1"',
        "  use_spot: true",
        "  disk_size: 500",
        "num_nodes: 2",
    ):
        assert f"{line}\n" in printed
    assert "--idle-minutes 115\n" in printed
    assert printed.endswith("# Dryrun finished.\n")
    assert sky.clusters() == {}
    assert Launched().names() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "--cloud", "aws"], "--gpu needs the kind and number"),
        (["--cloud", "aws", "--host", "box"], "--host is for machines of the kind 'ssh'"),
        (["--cloud", "ssh", "--host", "box", "--spot"], "--spot is for machines of the kind 'skypilot'"),
        (["--cloud", "ssh", "--host", "box", "--nodes", "2"], "--nodes is for machines of the kind 'skypilot'"),
        (["--gpu", "H100:1", "--node", "gpu2"], "--node is for machines of the kind 'ssh'"),
        (["--gpu", "H100:1", "--nodes", "0"], "num_nodes must be 1 to 64"),
        (["--gpu", "H100:1", "--nodes", "2", "--volume", "disk"], "a volume is the disk of one machine"),
        (["--gpu", "H100:1", "--spot", "--on-idle", "stop"], "spot machines cannot be stopped"),
        (["--gpu", "H100:1", "--python", "python3.12"], "--python does not apply"),
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


def test_the_status_of_several_machines_is_asked_once(
    sky: FakeSky, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        settings = {"config": SkyConfig(gpu="H100:1"), "server_config": None}
        Launched().save(make_record(name, f"~/.art/servers/{name}", 1024, settings, launched_at=0.0), "")
    assert main(["launch", "status"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["one", "two"]
    assert all("no machine; 0.00 USD so far" in row for row in rows)
    assert sky.calls("status") == [["status", "--refresh", "one", "two", "-o", "json"]]
    assert len(sky.calls("cost-report")) == 1
    sky.fail("status", "killed")
    assert main(["launch", "status"]) == 0
    assert capsys.readouterr().out.count("unknown: `") == 2, "no second try"
    monkeypatch.setattr(sky_tool, "TABLE_TIMEOUT_S", 0.0)
    assert main(["launch", "status"]) == 0
    assert capsys.readouterr().out.count("unknown: SkyPilot gave no answer within 0 s") == 2


def test_times_are_read() -> None:
    assert [idle_minutes(text) for text in ("30m", "2h", "1d", "45")] == [30, 120, 1440, 45]


@pytest.mark.slow  # seconds of CPU: some thirty processes
def test_a_machine_is_launched_looked_at_and_taken_down(sky: FakeSky, capsys: pytest.CaptureFixture[str]) -> None:
    launch = ["launch", "--cloud", "lambda", "--source", "art==1.2.3", "--name", CLUSTER, "--budget", "40"]
    assert main(launch) == 0
    printed = capsys.readouterr().out
    assert f"art launch tunnel {CLUSTER}" in printed
    assert Launched().key_path(CLUSTER).read_text() not in printed
    sky.set_costs((2.5, 3600.0))
    assert main(["launch", "status"]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert re.match(
        rf"{CLUSTER} +skypilot +{CLUSTER} +running; UP on Lambda/us-west-3: .* 2.50 USD an hour +1.2.3 +1 ", row
    )
    assert main(["launch", "logs"]) == 0
    assert "art-server listens" in capsys.readouterr().out
    assert main(["launch", "down"]) == 0
    assert "is down; its data stays in" in capsys.readouterr().err
    assert sky.clusters() == {}
    assert main(["launch", "status"]) == 0
    assert "no server was launched" in capsys.readouterr().out
