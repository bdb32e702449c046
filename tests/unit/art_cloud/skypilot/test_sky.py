"""`Sky` and `SkyConfig`: the program is found and asked, and its task file says what was asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from art.errors import ConfigError, MachineError, UnreachableError
from art_cloud.skypilot_backend import Sky, SkyConfig, SkyPilotBackend
from tests.support.fake_sky import RECORDED, FakeSky

FOLDER = "~/.art/servers/art"


async def test_the_program_is_that_of_the_variable_then_of_path(
    sky: FakeSky, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_path = sky.machine.bin_dir / "sky"
    assert await Sky().find() == str(on_path)
    other = tmp_path / "other-sky"
    other.write_text(on_path.read_text())
    other.chmod(0o755)
    monkeypatch.setenv("ART_SKY", str(other))
    assert await Sky().find() == str(other)
    monkeypatch.setenv("ART_SKY", "/nowhere/sky")
    with pytest.raises(ConfigError, match=r"'/nowhere/sky'.*uv tool install"):
        await Sky().find()


async def test_a_script_of_the_callers_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script `sky.py` there is not what Python imports."""
    program, folder = tmp_path / "bin" / "sky", tmp_path / "mine"
    program.parent.mkdir()
    folder.mkdir()
    # Like SkyPilot's program, it starts `python -m sky...`, which looks for `sky` in the working directory first.
    command = f"exec {sys.executable} -c \"import importlib.util as u; print(u.find_spec('sky'))\""
    program.write_text(f'#!/bin/sh\necho "version 0.14.0"; {command}\n')
    program.chmod(0o755)
    (folder / "sky.py").write_text("print('mine')")
    monkeypatch.chdir(folder)
    for named in (Path("../bin/sky"), program):
        monkeypatch.setenv("ART_SKY", str(named))
        assert (await Sky().run("status")).split() == ["version", "0.14.0", "None"]


@pytest.mark.parametrize(("version", "is_new_enough"), [("0.9.3", False), ("0.13.0", False), ("0.14.1", True),
                                                        ("1.0.0.dev20261101", True)])  # fmt: skip
async def test_a_version_that_is_too_old_is_refused(sky: FakeSky, version: str, is_new_enough: bool) -> None:
    sky.set_version(version)
    if is_new_enough:
        await Sky().find()
    else:
        with pytest.raises(ConfigError, match=f"SkyPilot {version}, and ART needs 0.14"):
            await Sky().find()


async def test_another_program_of_that_name_is_refused(sky: FakeSky) -> None:
    (sky.machine.bin_dir / "sky").write_text("#!/bin/sh\necho planets 3\n")
    with pytest.raises(ConfigError, match="not SkyPilot's program"):
        await Sky().find()


@pytest.mark.parametrize(
    "recorded", sorted(path.stem for path in RECORDED.glob("*.txt") if path.stem not in ("not-found", "no-api-server"))
)
async def test_what_skypilot_refuses_is_said_in_its_words(sky: FakeSky, recorded: str) -> None:
    """`sky stop` and `sky down` say so with the exit status 0."""
    sky.fail("launch", recorded)
    with pytest.raises(MachineError) as caught:
        await Sky().run("launch", "--cluster", "art", "task.yaml")
    assert not isinstance(caught.value, UnreachableError)
    said = re.sub(r"\x1b\[[0-9;]*m", "", (RECORDED / f"{recorded}.txt").read_text())
    assert said.strip().splitlines()[-1].strip() in str(caught.value)


async def test_a_command_without_an_answer_is_repeated(sky: FakeSky, no_pauses: None) -> None:
    sky.fail("status", "killed", "no-api-server")
    assert await Sky().status("art") is None
    assert len(sky.calls("status")) == 3
    program = "#!/bin/sh\n[ $1 = --version ] && echo version 0.14.1 || exec sleep 600\n"
    (sky.machine.bin_dir / "sky").write_text(program)
    with pytest.raises(UnreachableError, match="did not end within 0 s"):
        await Sky().run("status", timeout_s=0.05)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu": "H100 x 8"}, "a kind and a number"),
        ({"region": "us-east-1"}, "needs its cloud"),
        ({"idle_minutes": 1}, "idle_minutes must be 2 or more"),
        ({"on_idle": "sleep"}, '"down" or "stop"'),
        ({"resources": {"ports": 8000}}, "open the machine to the internet"),
        ({"resources": {"autostop": False}}, "is set by idle_minutes"),
    ],
)
def test_what_is_impossible_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SkyConfig(**settings)


@pytest.mark.parametrize("name", ["", "1st", "a b", "-c", "art-", "a" * 33, "art;ls"])
def test_a_name_that_skypilot_would_not_take_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a cluster's name"):
        SkyPilotBackend("H100:1", cluster=name)


def test_the_task_file_is_yaml_that_says_what_was_asked_for() -> None:
    config = SkyConfig(gpu="H100", cloud="aws", region="us-east-1", spot=True,
                       resources={"cpus": "16+", "labels": {"team": "x: y"}})  # fmt: skip
    backend = SkyPilotBackend(config=config)
    made, text = config.task("art", backend.server_folder), backend.task()
    assert yaml.safe_load(text) == made
    assert "ports" not in text
    assert made["resources"] == {
        "infra": "aws/us-east-1", "accelerators": "H100:1", "use_spot": True, "cpus": "16+", "labels": {"team": "x: y"},
        "autostop": {"idle_minutes": 5, "down": True, "wait_for": "jobs_and_ssh"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "deletes"),
    [({}, False), ({"on_idle": "down"}, True), ({"spot": True}, True), ({"volume": "v"}, True),
     ({"volume": "v", "on_idle": "stop"}, False)],
)  # fmt: skip
def test_an_idle_machine_is_deleted_only_if_its_data_is_elsewhere_or_was_risked(
    settings: dict[str, Any], deletes: bool
) -> None:
    assert SkyConfig(**settings).task("art", FOLDER)["resources"]["autostop"]["down"] is deletes


@pytest.mark.parametrize(("idle_minutes", "of_job", "of_sky"), [(30, 25, 5), (10, 5, 5), (4, 2, 2), (3, 2, 1)])
def test_the_job_and_skypilot_share_the_idle_minutes(idle_minutes: int, of_job: int, of_sky: int) -> None:
    made = SkyConfig(idle_minutes=idle_minutes).task("art", FOLDER)
    assert f"-mmin -{of_job} " in made["run"]
    assert made["resources"]["autostop"]["idle_minutes"] == of_sky


def test_the_job_goes_on_while_the_server_writes_its_database(tmp_path: Path) -> None:
    script = SkyConfig(volume="v").task("art", "/art-volume/art")["run"].replace("sleep 15", "sleep 0.05")
    script = script.replace("/art-volume", str(tmp_path))
    data, in_use = tmp_path / "art" / "data", tmp_path / "art" / "in-use"
    data.mkdir(parents=True)
    (data / "art.db-wal").touch()
    job = subprocess.Popen(["bash", "-c", script])
    while not in_use.exists():
        time.sleep(0.01)
    old = time.time() - 26 * 60
    os.utime(data, (old, old))
    seen = in_use.stat().st_mtime_ns
    while in_use.stat().st_mtime_ns <= seen + 200_000_000:  # it still goes on, for the database
        assert job.poll() is None
        time.sleep(0.01)
    os.utime(data / "art.db-wal", (old, old))
    assert job.wait(60) == 0
    assert not in_use.exists()
