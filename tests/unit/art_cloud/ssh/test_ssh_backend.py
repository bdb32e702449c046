"""`SshBackend`: from a host's name to a client whose address stays."""

from __future__ import annotations

import pytest

import art
from art.errors import MachineError
from art_cloud import ssh_backend
from art_cloud.ssh_backend import Install
from tests.support.fake_ssh import FakeMachine
from tests.unit.art_cloud.ssh.test_tunnel import until

INSTALL = Install(source="art==1.2.3", extras=())


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_backend, "PING_EVERY_S", 0.05)
    monkeypatch.setattr(ssh_backend, "PING_TIMEOUT_S", 1.0)


def backend_of(machine: FakeMachine) -> art.SshBackend:
    return art.SshBackend("box", install=INSTALL)


async def test_a_server_goes_on_when_its_backend_is_closed_and_is_found_again(
    machine: FakeMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    async with backend_of(machine) as backend:
        health = await (await backend.open()).health()
        assert health["is_known"] is True
    printed = capsys.readouterr().err
    assert "box: installing art==1.2.3" in printed
    assert "box: ready at http://127.0.0.1:" in printed
    assert len(machine.processes("server.py")) == 1
    await until(lambda: not machine.processes("-L"))
    async with backend_of(machine) as backend:
        assert (await (await backend.open()).health())["pid"] == health["pid"]
        assert "installing" not in capsys.readouterr().err
        await backend.stop()
    assert machine.processes() == {}


async def test_a_backend_survives_the_death_of_tunnel_and_server_and_a_reboot(
    machine: FakeMachine, quick_pings: None
) -> None:
    async with backend_of(machine) as backend:
        client = await backend.open()
        pid = (await client.health())["pid"]
        assert backend.tunnel is not None
        for words in ("-L", "server.py", ""):
            num_opened = backend.tunnel.num_opened
            machine.kill(words)
            if words != "server.py":
                await until(lambda num_opened=num_opened: backend.tunnel.num_opened > num_opened)
            health = await client.health()
            assert health["is_known"] is True
            assert (health["pid"] == pid) is (words == "-L")
            pid = health["pid"]
            assert await backend.open() is client
        await backend.down(delete_data=True)
    assert machine.processes() == {}
    assert not machine.server_folder.exists()


async def test_a_machine_that_does_not_let_us_in_is_an_error_and_leaves_nothing(machine: FakeMachine) -> None:
    machine.set_problem("alice@box: Permission denied (publickey,password).")
    backend = backend_of(machine)
    with pytest.raises(MachineError, match="ssh said: alice@box: Permission denied"):
        await backend.open()
    assert backend.tunnel is None
    machine.set_problem()
    await backend.open()
    await backend.stop()
    assert machine.processes() == {}


async def test_the_port_here_can_be_chosen(machine: FakeMachine) -> None:
    async with backend_of(machine) as first:
        await first.open()
        port = first.local_port
    second = backend_of(machine)
    second.local_port = port
    async with second:
        assert (await second.open()).base_url == f"http://127.0.0.1:{port}"


def test_a_path_is_that_of_the_server_and_not_of_this_machine(machine: FakeMachine) -> None:
    assert backend_of(machine).shares_files is False
