"""The server of `SshBackend` and its keeper: installing, starting, restarting, stopping, on a machine that is a folder of this one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import art
from art.errors import ConfigError, MachineError, UnreachableError
from art_cloud import ssh
from art_cloud.ssh_backend import Install
from tests.support.fake_ssh import FakeMachine
from tests.unit.art_cloud.ssh.test_tunnel import until

INSTALL = Install(source="art==1.2.3", extras=())


def server_of(machine: FakeMachine, config: art.ServerConfig | None = None) -> art.SshBackend:
    return art.SshBackend("box", install=INSTALL, server_config=config)


async def test_a_server_is_installed_once_started_once_and_found_again_with_its_settings(
    machine: FakeMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    server = server_of(machine, art.ServerConfig(only_models=True))
    one, first = await asyncio.gather(server.start_server(), server.start_server())
    assert one.is_running
    assert (one.port, one.api_key) == (first.port, first.api_key), "two who start it at once get one server"
    assert one.api_key.startswith("art-")
    assert one.api_key not in repr(one)
    assert "installing art==1.2.3" in capsys.readouterr().err
    assert await server.start_server() == await server_of(machine).start_server()
    assert capsys.readouterr().err == ""
    assert [len(machine.processes(words)) for words in ("keeper.sh", "server.py")] == [1, 1]
    with pytest.raises(ConfigError, match="runs already, with other settings"):
        await server_of(machine, art.ServerConfig(strict=True)).start_server()
    machine.kill()
    state = await server.server_status()
    assert state is not None
    assert not state.is_running
    revived = await art.SshBackend("box", install=Install(source="installed")).start_server()
    assert (revived.api_key, revived.config) == (first.api_key, one.config), "after a reboot as before"
    await server.stop()
    assert machine.processes() == {}
    await server.stop()


async def test_a_server_that_is_killed_comes_back_and_ends_with_its_keeper(machine: FakeMachine) -> None:
    server = server_of(machine)
    first = await server.start_server()
    (pid,) = machine.processes("server.py")
    machine.kill("server.py")
    await until(lambda: machine.processes("server.py").keys() - {pid})
    while (state := await server.server_status()) is not None and not state.port:
        await asyncio.sleep(0.05)
    assert state == first
    machine.kill("keeper.sh")
    await until(lambda: not machine.processes("server.py"))
    assert (await server.start_server()).api_key == first.api_key


def content_of(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


async def test_what_is_secret_is_in_one_file_and_in_no_list_of_processes(machine: FakeMachine) -> None:
    key = (await server_of(machine).start_server()).api_key.encode()
    holders = [path for path in machine.folder.rglob("*") if path.is_file() and key in path.read_bytes()]
    assert holders == [machine.server_folder / "api.key"]
    assert holders[0].stat().st_mode & 0o777 == 0o600
    assert len(machine.processes()) == 2
    for pid in machine.processes():
        assert not any(key in content_of(pid, name) for name in ("cmdline", "environ"))


async def test_a_server_that_does_not_start_is_quoted(machine: FakeMachine) -> None:
    with pytest.raises(MachineError, match=r"does not start on box: (.|\n)*there is no CUDA device"):
        await server_of(machine, art.ServerConfig(gpu=True)).start_server()
    assert machine.processes() == {}


async def test_pip_that_fails_is_quoted_and_tried_again_the_next_time(machine: FakeMachine) -> None:
    machine.set_pip("ERROR: No matching distribution found for art==1.2.3\n", rc=1)
    with pytest.raises(MachineError, match=r"installing ART into ~/.art/servers/default failed:\nERROR: No matching"):
        await server_of(machine).start_server()
    machine.set_pip("fine\n")
    assert (await server_of(machine).start_server()).is_running


async def test_a_connection_that_breaks_is_made_again(machine: FakeMachine, no_pauses: None) -> None:
    machine.set_problem("kex_exchange_identification: Connection closed by remote host")
    with pytest.raises(UnreachableError):
        await server_of(machine).server_status()
    assert len(machine.calls()) == ssh.NUM_TRIES


async def test_removing_leaves_the_data_unless_it_is_named(machine: FakeMachine) -> None:
    server = server_of(machine)
    machine.set_shell("printf 'Welcome! '; echo 'Maintenance on Sunday' >&2")  # a login shell may print what it likes
    await server.start_server()
    (machine.server_folder / "data" / "art.db").touch()
    assert await server.down()
    assert [path.name for path in machine.server_folder.iterdir()] == ["data"]
    assert machine.processes() == {}
    assert not await server.down(delete_data=True)
    assert not machine.server_folder.exists()
    assert not await server.down()


async def test_a_folder_that_cannot_be_deleted_is_told(machine: FakeMachine) -> None:
    machine.set_program("rm", "echo rm: cannot remove it >&2; exit 1")
    with pytest.raises(MachineError, match=r"deleting ~/.art/servers/default failed: rm: cannot remove it"):
        await server_of(machine).down(delete_data=True)


def test_what_cannot_be_a_server_is_refused() -> None:
    for folder in ("art", "~", "/", "~/"):
        with pytest.raises(ConfigError, match="folder must be"):
            art.SshBackend("box", install=Install(folder=folder))
    with pytest.raises(ConfigError, match="letters, digits"):
        art.SshBackend("box", name="../etc")
    for config in (art.ServerConfig(host="0.0.0.0"), art.ServerConfig(port=8000)):
        with pytest.raises(ConfigError, match="host and port cannot be set"):
            art.SshBackend("box", server_config=config)


def test_what_is_installed_is_what_runs_here(tmp_path: Path) -> None:
    target, source = Install().package()
    assert target == "./source[local]", "the tests run from a checkout"
    assert source == Install().package()[1] != b""
    assert Install(source="index", extras=("local", "vllm")).package() == (
        f"agent-reinforcement-trainer[local,vllm]=={art.__version__}", b"",
    )  # fmt: skip
    for wrong in (Install(source=tmp_path), Install(source="./no.whl")):
        with pytest.raises(ConfigError):
            wrong.package()


async def test_the_source_is_sent_and_installed(machine: FakeMachine) -> None:
    machine.set_foreign_shell()
    server = art.SshBackend("box", install=Install(extras=()))
    assert (await server.start_server()).is_running
    assert (machine.server_folder / "source/src/art/__init__.py").is_file()
