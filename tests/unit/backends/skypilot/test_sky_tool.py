"""`Sky`: the program is found, or it is said what to do; its failures become errors with a meaning."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from art.backends.skypilot import sky_tool
from art.backends.skypilot.failures import explain
from art.backends.skypilot.sky_tool import Sky, install_sky
from art.errors import ArtError, ConfigError, MachineError, UnreachableError
from tests.support.fake_sky import RECORDED, FakeSky


async def test_the_program_is_that_of_the_option_then_of_the_variable_then_of_path(
    sky: FakeSky, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_path = sky.machine.bin_dir / "sky"
    assert await Sky().find() == str(on_path)
    other = tmp_path / "other-sky"
    other.write_text(on_path.read_text())
    other.chmod(0o755)
    monkeypatch.setenv("ART_SKY", str(other))
    assert await Sky().find() == str(other)
    assert await Sky(on_path).find() == str(on_path)


async def test_without_the_program_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sky_tool, "own_environment", lambda: tmp_path / "own")
    with pytest.raises(ConfigError, match="art launch --install-sky"):
        await Sky().find()
    with pytest.raises(ConfigError, match="'/nowhere/sky'"):
        await Sky("/nowhere/sky").find()


async def test_the_environment_that_was_made_on_request_is_found(
    sky: FakeSky, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "own" / "bin" / "sky"
    own.parent.mkdir(parents=True)
    (sky.machine.bin_dir / "sky").rename(own)
    monkeypatch.setattr(sky_tool, "own_environment", lambda: tmp_path / "own")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert await Sky().find() == str(own)


async def test_scripts_and_settings_of_the_callers_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script `sky.py` there is not what Python imports, and SkyPilot's settings there hold."""
    program, folder = tmp_path / "bin" / "sky", tmp_path / "mine"
    program.parent.mkdir()
    folder.mkdir()
    # Like SkyPilot's program, it starts `python -m sky...`, which looks for `sky` in the working directory first.
    command = f"exec {sys.executable} -c \"import importlib.util as u; print(u.find_spec('sky'))\""
    program.write_text(f'#!/bin/sh\necho "version 0.14.0"; echo "$SKYPILOT_PROJECT_CONFIG"; {command}\n')
    program.chmod(0o755)
    (folder / "sky.py").write_text("print('mine')")
    monkeypatch.chdir(folder)
    for named in (program, Path("../bin/sky")):
        assert (await Sky(named).run("status")).stdout.split() == ["version", "0.14.0", "None"]
    (folder / ".sky.yaml").write_text("{}")
    assert (await Sky(program).run("status")).stdout.split() == ["version", "0.14.0", f"{folder}/.sky.yaml", "None"]


@pytest.mark.parametrize(("version", "is_new_enough"), [("0.9.3", False), ("0.13.0", False), ("0.14.1", True),
                                                        ("1.0.0.dev20261101", True)])  # fmt: skip
async def test_a_version_that_is_too_old_is_refused(sky: FakeSky, version: str, is_new_enough: bool) -> None:
    sky.set_version(version)
    if is_new_enough:
        await Sky().find()
    else:
        with pytest.raises(ConfigError, match=f"SkyPilot {version}, and ART needs 0.14"):
            await Sky().find()


async def test_a_program_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "sky").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "sky").chmod(0o755)
    with pytest.raises(ConfigError, match=r"sky cannot be run: Exec format error"):
        await Sky(tmp_path / "sky").find()


async def test_an_answer_may_be_one_long_line(sky: FakeSky, tmp_path: Path) -> None:
    rows = [{"name": f"cluster-{number}", "resources": "x" * 1000} for number in range(3000)]
    (tmp_path / "rows").write_text(json.dumps(rows))
    (tmp_path / "sky").write_text(
        f"#!/bin/sh\ncase $1 in --version) echo skypilot, version 0.14.1;; *) cat {tmp_path}/rows;; esac\n"
    )
    (tmp_path / "sky").chmod(0o755)
    assert await Sky(tmp_path / "sky").ask("cost-report") == rows


async def test_another_program_of_that_name_is_refused(sky: FakeSky) -> None:
    program = sky.machine.bin_dir / "sky"
    program.write_text("#!/bin/sh\necho planets 3\n")
    with pytest.raises(ConfigError, match="not SkyPilot's program"):
        await Sky().find()


@pytest.mark.parametrize(
    ("recorded", "kind", "meaning"),
    [
        ("no-cloud", ConfigError, "run `sky check`"),
        ("cloud-not-enabled", ConfigError, "run `sky check`"),
        ("invalid-task", ConfigError, "refuses the task file"),
        ("no-such-gpu", ConfigError, "no enabled cloud offers such a machine"),
        ("no-spot-there", ConfigError, "no enabled cloud offers such a machine"),
        ("mismatch", ConfigError, "exists with other resources"),
        ("autostop-refused", ConfigError, "cannot stop idle machines"),
        ("spot-cannot-stop", ConfigError, "cannot do this on this cloud"),
        ("no-quota", MachineError, "no quota"),
        ("no-capacity", MachineError, "no cloud has such a machine free now"),
        ("no-such-cluster", MachineError, "knows no such cluster"),
        ("no-api-server", UnreachableError, "sky api start"),
    ],
)
def test_a_failure_of_skypilot_says_what_to_do(recorded: str, kind: type[ArtError], meaning: str) -> None:
    text = (RECORDED / f"{recorded}.txt").read_text().partition("\n")[2]
    error = explain("sky launch", text)
    assert type(error) is kind
    assert meaning in error.message
    assert text.strip().splitlines()[-1].strip() in error.message


def test_a_failure_that_is_not_known_is_quoted() -> None:
    error = explain("sky launch", "something new")
    assert type(error) is MachineError
    assert error.message == "sky launch failed. SkyPilot said:\nsomething new"


STARTED = "Failed to connect to SkyPilot API server at http://127.0.0.1:46580. Starting a local server.\n✓ started\n"


@pytest.mark.parametrize(
    ("text", "kind", "meaning"),
    [
        (f"{STARTED}sky.exceptions.NoCloudAccessError: Cloud access is not set up", ConfigError, "run `sky check`"),
        (f"{STARTED}sky.exceptions.CloudError: requests error (ConnectionError): HTTPSConnectionPool", UnreachableError,
         "does its network work"),
        (f"{STARTED}RuntimeError: SkyPilot API server process exited unexpectedly.", UnreachableError, "own server"),
    ],
)  # fmt: skip
def test_a_failure_of_the_first_command_is_not_blamed_on_the_server_that_it_started(
    text: str, kind: type[ArtError], meaning: str
) -> None:
    error = explain("sky launch", text)
    assert type(error) is kind
    assert meaning in error.message


async def test_a_failure_with_exit_status_0_is_one(sky: FakeSky) -> None:
    sky.fail("stop", "spot-cannot-stop")
    with pytest.raises(ConfigError, match="Stopping spot instances"):
        await Sky().run("stop", "--yes", "art-spot")


async def test_a_program_that_is_killed_gave_no_answer(sky: FakeSky) -> None:
    sky.fail("status", "killed")
    with pytest.raises(UnreachableError, match="signal 9"):
        await Sky().ask("status")


async def test_a_program_that_is_late_is_ended(sky: FakeSky) -> None:
    (sky.machine.bin_dir / "sky").write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo version 0.14.1 || exec sleep 600\n'
    )
    with pytest.raises(UnreachableError, match="did not end within 0 s"):
        await Sky().run("status", timeout_s=0.2)


@pytest.mark.parametrize(
    "warning",
    [
        "WARNING: skypilot 0.14.1 does not provide the extra 'awz'",
        "warning: The package `skypilot==0.14.1` does not have an extra named `awz`",
    ],
)
async def test_a_cloud_that_skypilot_does_not_have_is_refused(warning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: object) -> sky_tool.Ran:
        return sky_tool.Ran(0, "Successfully installed", warning)

    monkeypatch.setattr(sky_tool, "_run", run)
    with pytest.raises(ConfigError, match="no cloud 'awz'"):
        await install_sky("awz", lambda _: None)


@pytest.mark.parametrize("has_uv", [True, False])
async def test_skypilot_is_installed_into_an_environment_of_its_own(
    has_uv: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own, tools = tmp_path / "own", tmp_path / "tools"
    monkeypatch.setattr(sky_tool, "own_environment", lambda: own)
    for path in (tools / "uv", own / "bin" / "python", tmp_path / "python"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "$(basename $0) $@" >> {tmp_path}/calls\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin" if has_uv else "/usr/bin:/bin")
    monkeypatch.setattr(sky_tool.sys, "executable", str(tmp_path / "python"))
    assert await install_sky("aws", lambda _: None) == own / "bin" / "sky"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-1].endswith("skypilot[aws]>=0.14")
    assert all(("uv" in call.split()[0]) == has_uv for call in calls)
    with pytest.raises(ConfigError, match="a cloud is a name"):
        await install_sky("aws; rm -rf /", lambda _: None)
