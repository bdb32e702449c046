"""`RemoteServer` and its keeper: installing, starting, restarting, stopping, on a machine that is a folder of this one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import art
from art.backends.ssh import Install, RemoteServer, Ssh, remote_server
from art.errors import ConfigError, MachineError, UnreachableError
from tests.support.fake_ssh import FakeMachine
from tests.unit.backends.ssh.test_tunnel import until

INSTALL = Install(source="art==1.2.3", extras=())


def server_of(machine: FakeMachine, config: art.ServerConfig | None = None) -> RemoteServer:
    return RemoteServer(Ssh("box"), install=INSTALL, config=config)


def silent(line: str) -> None:
    pass


async def test_a_server_is_installed_once_started_once_and_found_again_with_its_settings(machine: FakeMachine) -> None:
    lines: list[str] = []
    server = server_of(machine, art.ServerConfig(only_models=True))
    one, first = await asyncio.gather(server.ensure(lines.append), server.ensure(silent))
    assert one.is_running
    assert (one.port, one.api_key) == (first.port, first.api_key), "two who start it at once get one server"
    assert one.api_key.startswith("art-")
    assert one.api_key not in repr(one)
    assert "installing art==1.2.3" in lines[0]
    again: list[str] = []
    assert await server.ensure(again.append) == await server_of(machine).ensure(again.append)
    assert again == []
    assert [len(machine.processes(words)) for words in ("keeper run", "server.py")] == [1, 1]
    with pytest.raises(ConfigError, match="runs already, with other settings"):
        await server_of(machine, art.ServerConfig(drain_s=3)).ensure(silent)
    machine.kill()
    state = await server.status()
    assert state is not None
    assert not state.is_running
    revived = await RemoteServer(Ssh("box"), install=Install(source="installed")).ensure(silent)
    assert (revived.api_key, revived.config) == (first.api_key, one.config), "after a reboot as before"
    await server.stop()
    assert machine.processes() == {}
    await server.stop()


async def test_a_server_that_is_killed_comes_back_and_ends_with_its_keeper(machine: FakeMachine) -> None:
    server = server_of(machine)
    first = await server.ensure(silent)
    (pid,) = machine.processes("server.py")
    machine.kill("server.py")
    await until(lambda: machine.processes("server.py").keys() - {pid})
    assert await server.status() == first
    machine.kill("keeper run")
    await until(lambda: not machine.processes("server.py"))
    assert (await server.start()).api_key == first.api_key


def content_of(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


async def test_what_is_secret_is_in_one_file_and_in_no_list_of_processes(machine: FakeMachine) -> None:
    key = (await server_of(machine).ensure(silent)).api_key.encode()
    holders = [path for path in machine.folder.rglob("*") if path.is_file() and key in path.read_bytes()]
    assert holders == [machine.server_folder / "api.key"]
    assert holders[0].stat().st_mode & 0o777 == 0o600
    assert len(machine.processes()) == 2
    for pid in machine.processes():
        assert not any(key in content_of(pid, name) for name in ("cmdline", "environ"))


async def test_a_server_that_does_not_start_is_quoted(machine: FakeMachine) -> None:
    with pytest.raises(MachineError, match=r"does not start on box: (.|\n)*there is no CUDA device"):
        await server_of(machine, art.ServerConfig(gpu=True)).ensure(silent)
    assert machine.processes() == {}


async def test_pip_that_fails_is_quoted_and_tried_again_the_next_time(machine: FakeMachine) -> None:
    machine.set_pip("ERROR: No matching distribution found for art==1.2.3\n", rc=1)
    with pytest.raises(MachineError, match=r"installing ART into ~/.art/servers/default failed:\nERROR: No matching"):
        await server_of(machine).ensure(silent)
    machine.set_pip("fine\n")
    assert (await server_of(machine).ensure(silent)).is_running


async def test_a_machine_without_a_python_that_is_new_enough_gets_one_of_uv(machine: FakeMachine) -> None:
    environment = machine.python.parents[1]
    environment.rename(machine.folder / "made")
    machine.set_program("python3", 'case "$1" in -c) exit 1;; esac; mkdir -p uv/bin; cp "$FAKE/uv" uv/bin/uv')
    for name in ("python3.11", "python3.12", "python3.13"):
        machine.set_program(name, "exit 1")
    machine.set_program("made-by-uv", 'cp -r "$FAKE/made" venv')
    uv = (
        f'#!/bin/sh\n[ "$2" = find ] && echo {machine.folder}/bin/made-by-uv || echo "$UV_PYTHON_INSTALL_DIR" > asked\n'
    )
    (machine.folder / "uv").write_text(uv)
    (machine.folder / "uv").chmod(0o755)
    (machine.home / ".local/bin").mkdir(parents=True)
    assert (await server_of(machine).ensure(silent)).is_running
    assert (machine.server_folder / "asked").read_text() == f"{machine.server_folder}/python\n", "`down` removes it"


async def test_a_connection_that_breaks_is_made_again(machine: FakeMachine) -> None:
    machine.set_problem("kex_exchange_identification: Connection closed by remote host")
    with pytest.raises(UnreachableError):
        await server_of(machine).status()
    assert len(machine.calls()) == remote_server.NUM_TRIES


async def test_removing_leaves_the_data_unless_it_is_named(machine: FakeMachine) -> None:
    server = server_of(machine)
    machine.set_shell("printf 'Welcome! '; echo 'Maintenance on Sunday' >&2")  # a login shell may print what it likes
    await server.ensure(silent)
    (machine.server_folder / "data" / "art.db").touch()
    assert await server.remove()
    assert [path.name for path in machine.server_folder.iterdir()] == ["data"]
    assert machine.processes() == {}
    assert not await server.remove(delete_data=True)
    assert not machine.server_folder.exists()
    assert not await server.remove()


async def test_a_folder_that_cannot_be_deleted_is_told(machine: FakeMachine) -> None:
    machine.set_program("rm", "echo rm: cannot remove it >&2; exit 1")
    with pytest.raises(MachineError, match=r"deleting ~/.art/servers/default failed: rm: cannot remove it"):
        await server_of(machine).remove(delete_data=True)


def test_what_cannot_be_a_server_is_refused() -> None:
    for folder in ("art", "~", "/", "~/"):
        with pytest.raises(ConfigError, match="folder must be"):
            RemoteServer(Ssh("box"), install=Install(folder=folder))
    with pytest.raises(ConfigError, match="letters, digits"):
        RemoteServer(Ssh("box"), name="../etc")
    for config in (art.ServerConfig(host="0.0.0.0"), art.ServerConfig(port=8000)):
        with pytest.raises(ConfigError, match="host and port cannot be set"):
            RemoteServer(Ssh("box"), config=config)


def test_what_is_installed_is_what_runs_here(tmp_path: Path) -> None:
    target, file = Install().package()
    assert target == "./source[local]", "the tests run from a checkout"
    assert file == Install().package()[1]
    assert Install(source="index", extras=("local", "vllm")).package()[0] == (
        f"agent-reinforcement-trainer[local,vllm]=={art.__version__}"
    )
    wheel = tmp_path / "agent_reinforcement_trainer-9-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    assert Install(source=wheel, extras=()).package() == (f"./{wheel.name}", (wheel.name, b"wheel"))
    for wrong in (Install(source=tmp_path), Install(source="./no.whl"), Install(extras=("a;b",))):
        with pytest.raises(ConfigError):
            wrong.package()
