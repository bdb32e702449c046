"""OpenSSH itself, with settings that people have for their terminals: none of them stands in the way.

The machine is a user account of this one with an sshd of its own; see `tests/support/ssh_machine.py`.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from art.errors import MachineError
from art_cloud.ssh import Ssh, Tunnel, free_port
from tests.support import ssh_machine
from tests.support.ssh_machine import ALIAS, SshMachine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(ssh_machine.missing() is not None, reason=f"no other machine: {ssh_machine.missing()}"),
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshMachine]:
    machine = SshMachine(tmp_path_factory.mktemp("machine"))
    start = machine.home / ".bashrc"
    start.write_text("printf 'welcome \\033]0;title\\007'; echo 'Permission denied to strangers' >&2\n")
    yield machine
    machine.close()


def configured(machine: SshMachine, folder: Path, *lines: str) -> Ssh:
    """The machine with further lines in the configuration of ssh."""
    config = folder / "config"
    config.write_text(Path(machine.config).read_text() + "".join(f"  {line}\n" for line in lines))
    return Ssh(ALIAS, config=config)


@contextlib.contextmanager
def terminal(ssh: Ssh, port: int) -> Iterator[None]:
    """A session of the user's own that forwards a port."""
    assert ssh.config is not None
    process = subprocess.Popen(["ssh", "-F", str(ssh.config), "-N", ALIAS])
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield
    process.kill()
    process.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_command_and_a_tunnel_work_with_settings_for_a_terminal(machine: SshMachine, tmp_path: Path) -> None:
    port = free_port()
    sharing = ("ControlMaster auto", f"ControlPath {tmp_path}/%C", "ControlPersist 60")
    ssh = configured(
        machine, tmp_path, "RemoteCommand tmux attach", "RequestTTY force", "LogLevel QUIET",
        f"LocalForward {port} localhost:8888", *sharing,
    )  # fmt: skip
    done = await ssh.run("echo done", timeout_s=60)
    assert done.stdout.endswith("done\n")
    assert names(tmp_path) == ["config"], "no connection is left for others to share"
    other = tmp_path / "other"
    other.mkdir()
    with terminal(configured(machine, other, f"LocalForward {port} localhost:8888"), port):
        assert "in use" not in (await ssh.run("echo done", timeout_s=60)).stderr
        with socket.create_server(("127.0.0.1", 0)) as target:
            tunnel = Tunnel(ssh, target.getsockname()[1])
            await tunnel.open()
            with socket.create_connection(("127.0.0.1", tunnel.local_port)):
                target.accept()[0].close()
            tunnel.close()


async def test_a_quiet_configuration_hides_no_refusal(machine: SshMachine, tmp_path: Path) -> None:
    ssh = configured(machine, tmp_path, "LogLevel QUIET")
    with pytest.raises(MachineError, match="Permission denied"):
        await Ssh(f"nobody@{ALIAS}", config=ssh.config).run("true", timeout_s=60)
