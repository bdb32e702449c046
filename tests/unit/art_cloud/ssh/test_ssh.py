"""`Ssh`: commands on another machine, and what is said when it does not let us in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from art.errors import ConfigError, MachineError, UnreachableError
from art_cloud.ssh import Ssh, shell_path
from tests.support.fake_ssh import FakeMachine
from tests.support.processes import wait_until_gone


@pytest.mark.parametrize("host", ["", "-oProxyCommand=evil", "a b", "alice@a b"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="a host is a name like"):
        Ssh(host)


def test_options_of_the_user_that_would_break_commands_are_replaced(machine: FakeMachine) -> None:
    command = Ssh("alice@gpu-box", config="/etc/c").base_command("-L", "1:2:3")
    assert command[-6:] == ["-F", "/etc/c", "-L", "1:2:3", "--", "alice@gpu-box"]
    for option in ("BatchMode=yes", "ControlMaster=no", "RemoteCommand=none", "LogLevel=INFO"):
        assert option in command


async def test_a_command_gets_its_input(machine: FakeMachine) -> None:
    done = await Ssh("box").run("cat; echo no >&2; exit 3", input=b"one\ntwo\n", timeout_s=20)
    assert (done.returncode, done.stdout, done.stderr) == (3, "one\ntwo\n", "no\n")
    assert (await Ssh("box").run("exit 0", input=b"x" * 1_000_000, timeout_s=20)).returncode == 0


async def test_a_command_that_does_not_end_is_given_up(machine: FakeMachine, no_pauses: None) -> None:
    with pytest.raises(UnreachableError, match=r"exec sleep 600.* did not end within 0 s"):
        await Ssh("box").run("exec sleep 600", timeout_s=0.05)
    wait_until_gone(list(machine.processes()))


async def test_a_helper_of_ssh_that_hangs_is_ended_with_a_cancelled_command(
    machine: FakeMachine, tmp_path: Path
) -> None:
    """A ProxyCommand, for example, holds the pipes of ssh."""
    helper = tmp_path / "helper"
    (machine.bin_dir / "ssh").write_text(f"#!/bin/sh\nsleep 600 & echo $! > {helper}\nwait\n")
    running = asyncio.create_task(Ssh("box").run("true", timeout_s=60))
    while not (helper.exists() and helper.read_text().endswith("\n")):
        await asyncio.sleep(0.01)
    running.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await running
    wait_until_gone([int(helper.read_text())])


def test_paths_of_a_home_directory_are_left_to_the_shell() -> None:
    assert shell_path("~/a b") == "\"$HOME\"/'a b'"
    assert shell_path("/a/$b") == "'/a/$b'"


@pytest.mark.parametrize(
    ("said", "stays"),
    [
        ("No ED25519 host key is known for box\nHost key verification failed.", True),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", True),
        ("alice@box: Permission denied (publickey).", True),
        ("ssh: Could not resolve hostname box: Name or service not known", True),
        ("/home/a/.ssh/config: line 3: Bad configuration option: hots", True),
        ('Load key "/k": invalid format', True),
        ("Permission denied to strangers! This machine is watched.\nConnection closed by box port 22", False),
        ("ssh: connect to host box port 22: Connection refused", False),
        (" ", False),
    ],
)
async def test_a_refusal_stays_and_a_machine_that_is_away_may_come_back(
    machine: FakeMachine, no_pauses: None, said: str, stays: bool
) -> None:
    machine.set_problem(said)
    with pytest.raises(MachineError, match="`ssh box`") as caught:
        await Ssh("box").run("true", timeout_s=20)
    assert caught.value.transient is not stays
    assert said.strip().removeprefix("ssh: ") in str(caught.value)


def test_without_an_ssh_program_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no `ssh` program on PATH"):
        Ssh("box").base_command()
