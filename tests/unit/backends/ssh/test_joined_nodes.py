"""`SshBackend` with further machines. All of them are one folder of this machine, like machines that share a home."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import art
from art.backends.ssh import Completed, Install, Ssh, SshNode, ssh_nodes
from art.config import NodeConfig, NodesConfig, ServerConfig
from art.errors import ConfigError, MachineError
from tests.support.fake_ssh import FakeMachine

NewBackend = Callable[..., art.SshBackend]
INSTALL = Install(source="art==1.2.3", extras=())


@pytest.fixture
async def backend_of() -> AsyncIterator[NewBackend]:
    """Makes backends of the machine with such further machines, and closes them at the end."""
    made: list[art.SshBackend] = []

    def make(*names: str, **options: Any) -> art.SshBackend:
        made.append(art.SshBackend("box", nodes=names, **{"install": INSTALL, "show_progress": False} | options))
        return made[-1]

    yield make
    for backend in made:
        await backend.close()


def settings(machine: FakeMachine) -> dict[str, object]:
    values: dict[str, object] = json.loads((machine.server_folder / "settings.json").read_text())["config"]
    return values


async def test_a_server_is_started_with_nodes_that_it_can_reach_and_they_are_left_clean(
    machine: FakeMachine, backend_of: NewBackend
) -> None:
    machine.set_nodes()
    authorized = machine.home / ".ssh" / "authorized_keys"
    authorized.parent.mkdir()
    authorized.write_text("ssh-ed25519 AAAAmine alice")
    backend = backend_of("one", "alice@two=localhost:2222")
    await backend.open()
    folder = machine.server_folder / "nodes"
    config = NodesConfig.model_validate(settings(machine)["nodes"])
    assert config.address == "127.0.0.1"
    assert [node.name for node in config.others] == ["one", "alice@two"]
    start = ["ssh", "-F", f"{folder}/ssh_config", "-T", "node2", "true"]
    assert config.others[1].command("true") == start
    assert config.others[1].python == str(machine.python)
    ssh_config = (folder / "ssh_config").read_text()
    assert "Host node2\n  HostName localhost\n  Port 2222\n  User root\n" in ssh_config
    assert "StrictHostKeyChecking yes" in ssh_config
    assert (folder / "known_hosts").read_text() == "node1 ssh-ed25519 AAAAhost\nnode2 ssh-ed25519 AAAAhost\n"
    assert (folder / "key").stat().st_mode & 0o777 == 0o600
    public = (folder / "key.pub").read_text().strip()
    assert authorized.read_text() == f"ssh-ed25519 AAAAmine alice\nrestrict {public}\n"
    assert await backend.describe_nodes() == [("one", "joined", "1.2.3"), ("alice@two", "joined", "1.2.3")]

    await backend_of("one", "alice@two").open()  # it runs with these
    with pytest.raises(ConfigError, match="runs together with one, alice@two, and asked for is one"):
        await backend_of("one").open()
    with pytest.raises(ConfigError, match=r"runs with the address 127.0.0.1, and asked for is 10\.0\.0\.1"):
        await backend_of("one", "alice@two", address="10.0.0.1").open()
    machine.kill()
    machine.set_nodes("echo Connection refused >&2; exit 255")
    assert (await backend.server.revive()).config["nodes"] == config.model_dump(mode="json")  # without joining
    await backend.close()
    await backend_of().down()  # it finds the nodes by itself
    assert authorized.read_text() == "ssh-ed25519 AAAAmine alice\n"
    assert sorted(path.name for path in machine.server_folder.iterdir()) == ["data"]
    assert machine.processes("keeper.py") == {}


async def test_settings_of_before_stay_and_nodes_may_change_while_the_server_is_stopped(
    machine: FakeMachine, backend_of: NewBackend
) -> None:
    machine.set_nodes()
    first = backend_of("one", "two", server_config=ServerConfig(only_models=True))
    await first.open()
    await first.stop()
    second = backend_of("one", install=Install(source="installed"))
    await second.open()
    assert settings(machine)["only_models"] is True
    nodes_config = NodesConfig.model_validate(settings(machine)["nodes"])
    assert [node.name for node in nodes_config.others] == ["one"]
    await second.down()


async def test_a_node_that_the_first_machine_cannot_reach_is_named_and_nothing_is_started(
    machine: FakeMachine, backend_of: NewBackend
) -> None:
    machine.set_nodes("echo 'root@127.0.0.1: Permission denied (publickey).' >&2; exit 255")
    with pytest.raises(
        MachineError, match=r"box cannot log in to one .*Permission denied.*read ~/.ssh/authorized_keys"
    ):
        await backend_of("one").open()
    assert machine.processes("keeper.py") == {}
    said = '[["box", "127.0.0.1", "timed out"]]'
    machine.set_nodes(f"echo Welcome; echo '[\"127.0.0.1\", 1]'; read places; echo '{said}'; cat > /dev/null")
    with pytest.raises(MachineError, match="one cannot open a connection to box at 127") as refused:
        await backend_of("one").open()
    assert "box cannot open a connection to one at 127.0.0.1: Connection refused" in refused.value.message
    assert "open the firewall" in refused.value.message
    machine.set_nodes()
    with pytest.raises(MachineError, match=r"cannot open a port at '192\.0\.2\.77'"):
        await backend_of("one", address="192.0.2.77").open()
    assert machine.processes("keeper.py") == {}


async def test_a_node_may_have_another_home_directory(machine: FakeMachine, backend_of: NewBackend) -> None:
    machine.set_nodes()
    shutil.copytree(machine.home, machine.folder / "home-elsewhere", symlinks=True)
    folder = machine.folder / "home-elsewhere" / ".art" / "servers" / "default"
    backend = backend_of("elsewhere")
    await backend.open()
    (node,) = NodesConfig.model_validate(settings(machine)["nodes"]).others
    assert (node.python, node.received) == (str(folder / "venv" / "bin" / "python"), str(folder / "received"))
    assert not (folder / "nodes" / "key").exists()
    (folder / "data").mkdir()  # of an earlier server of this name
    await backend.down(delete_data=True)
    assert [path.name for path in folder.iterdir()] == ["data"]
    assert not machine.server_folder.exists()


async def test_a_node_with_a_server_of_its_own_is_left_alone(
    machine: FakeMachine, backend_of: NewBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(server: object) -> ssh_nodes._Look:
        return ssh_nodes._Look(str(machine.server_folder), "another machine", has_server=True)

    monkeypatch.setattr(ssh_nodes, "_look", look)
    with pytest.raises(ConfigError, match="one has a server of its own in"):
        await backend_of("one").open()


async def test_a_node_that_cannot_be_cleaned_is_named_and_the_rest_is_removed(
    machine: FakeMachine, backend_of: NewBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set_nodes()
    backend = backend_of("one")
    await backend.open()

    real = Ssh.run

    async def run(self: Ssh, *arguments: Any, **options: Any) -> Completed:
        if self.host == "one":
            raise MachineError("one is gone")
        return await real(self, *arguments, **options)

    monkeypatch.setattr(Ssh, "run", run)
    with pytest.raises(MachineError, match=r"box is clean, but a further machine of it is not.* one is gone"):
        await backend.down(delete_data=True)
    assert not machine.server_folder.exists()


def test_names_of_nodes_are_read() -> None:
    like = Ssh("box", user="alice", port=2222, identity="~/key", config=Path("/etc/other"))
    node = SshNode.parse("gpu2=10.0.0.2:22", like=like)
    assert (node.ssh.name, node.address, node.ssh.config) == ("alice@gpu2:2222", "10.0.0.2:22", Path("/etc/other"))
    assert SshNode.parse("bob@gpu2", like=like).ssh.user == "bob"
    for wrong in ("gpu2=", "gpu2=a b", "-oEvil", "gpu2=10.0.0.2:"):
        with pytest.raises(ConfigError):
            SshNode.parse(wrong, like=like)


async def test_machines_that_are_named_twice_are_refused(backend_of: NewBackend) -> None:
    with pytest.raises(ConfigError, match="one is named twice"):
        backend_of("one", "two", "one")
    with pytest.raises(ConfigError, match="box is named twice"):
        backend_of("box")
    config = ServerConfig(nodes=NodesConfig(address="10.0.0.1", others=(NodeConfig(name="a"),)))
    with pytest.raises(ConfigError, match="both name machines"):
        backend_of("one", server_config=config)
    with pytest.raises(ConfigError, match="`address` is for the machines in `nodes`"):
        backend_of(address="10.0.0.1")
