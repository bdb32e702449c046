"""`Tunnel`: a local address that stays while connections die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from art.backends.ssh import Ssh, Tunnel, tunnel
from art.errors import MachineError
from tests.support.fake_ssh import FakeMachine


async def until(is_so: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Port of a server that answers each connection with a word."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def word_of(port: int) -> bytes:
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        word = await reader.read()
        writer.close()
        return word
    return b""


async def test_a_tunnel_that_is_killed_comes_back_at_the_same_address(
    machine: FakeMachine, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    link = Tunnel(Ssh("box"), port)
    await link.open()
    assert link.url == f"http://127.0.0.1:{link.local_port}"
    assert await word_of(link.local_port) == b"hello"
    for count in (2, 3, 4):
        assert link.pid is not None
        os.kill(link.pid, signal.SIGKILL)
        await until(lambda count=count: link.num_opened == count)
        assert await word_of(link.local_port) == b"hello"
    assert "the tunnel to box broke (ssh ended: signal 9, SIGKILL) and is opened again" in caplog.text
    await link.close()
    assert link.pid is None
    assert await word_of(link.local_port) == b""
    await until(lambda: not machine.processes())


async def test_a_tunnel_that_cannot_return_says_why_and_goes_on_trying(machine: FakeMachine, port: int) -> None:
    link = Tunnel(Ssh("box"), port)
    await link.open()
    machine.set_problem("ssh: connect to host box port 22: Network is unreachable")
    assert link.pid is not None
    os.kill(link.pid, signal.SIGKILL)
    await until(lambda: "Network is unreachable" in (link.problem or ""))
    assert not link.is_open
    machine.set_problem()
    await until(lambda: link.is_open)
    assert link.problem is None
    await link.close()


async def test_a_tunnel_can_lead_to_another_port(machine: FakeMachine, port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        link = Tunnel(Ssh("box"), other.getsockname()[1])
        await link.open()
        local_port = link.local_port
        link.retarget(port)
        await until(lambda: link.num_opened == 2)
        assert await word_of(local_port) == b"hello"
        await link.close()


async def test_a_port_that_was_chosen_for_us_and_taken_meanwhile_is_changed(
    machine: FakeMachine, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "FIRST_DELAY_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        link = Tunnel(Ssh("box"), port)
        link.local_port = taken.getsockname()[1]
        await link.open()
        assert link.local_port != taken.getsockname()[1]
        assert await word_of(link.local_port) == b"hello"
        await link.close()


async def test_a_port_that_the_user_chose_and_another_program_has_is_named(machine: FakeMachine, port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        link = Tunnel(Ssh("box"), port, local_port=taken.getsockname()[1])
        with pytest.raises(MachineError, match=f"port {link.local_port} of this machine is in use"):
            await link.open()
    assert link.pid is None


@pytest.mark.parametrize(
    "said",
    [
        "bind [127.0.0.1]:8888: Address already in use\r\nchannel_setup_fwd_listener_tcpip: cannot listen to port: 8888\r\n"
        "Could not request local forwarding.\r\n",
        "Error: remote port forwarding failed for listen port 1080\r\n",
    ],
)
async def test_a_port_of_the_configuration_that_a_terminal_holds_is_no_obstacle(
    machine: FakeMachine, port: int, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr(tunnel, "FIRST_DELAY_S", 0.01)
    machine.set_other_forward(said)
    link = Tunnel(Ssh("box"), port)
    local_port = link.local_port
    await link.open()
    assert link.local_port == local_port
    assert await word_of(local_port) == b"hello"
    await link.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:  # its own port is still needed
        link = Tunnel(Ssh("box"), port, local_port=taken.getsockname()[1])
        with pytest.raises(MachineError, match=f"port {link.local_port} of this machine is in use"):
            await link.open()


@pytest.mark.parametrize("prints", ["welcome", "\\033]0;title\\007", "welcome\\n", "\\377\\n"])
async def test_a_shell_that_prints_when_it_starts_is_no_obstacle(machine: FakeMachine, port: int, prints: str) -> None:
    machine.set_shell(f"printf '{prints}'; printf '{prints}' >&2")
    link = Tunnel(Ssh("box"), port)
    await link.open()
    assert await word_of(link.local_port) == b"hello"
    await link.close()


async def test_a_tunnel_needs_no_particular_login_shell(machine: FakeMachine, port: int) -> None:
    machine.set_foreign_shell()
    link = Tunnel(Ssh("box"), port)
    await link.open()
    assert await word_of(link.local_port) == b"hello"
    await link.close()


async def test_a_machine_that_does_not_let_us_in_is_not_asked_for_ever(machine: FakeMachine) -> None:
    machine.set_problem("Host key verification failed.")
    with pytest.raises(MachineError, match="host key is not known"):
        await Tunnel(Ssh("box"), 1).open()


async def test_an_open_tunnel_stays_quiet(machine: FakeMachine, port: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    link = Tunnel(Ssh("box"), port)
    await link.open()
    await link.close()
    assert caplog.text == ""


async def test_a_program_that_is_killed_leaves_no_tunnel(machine: FakeMachine, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio\nfrom art.backends.ssh import Ssh, Tunnel\n"
        "async def main():\n    await Tunnel(Ssh('box'), 9).open()\n    print('open', flush=True)\n    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, str(program), stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"open\n"
    assert len(machine.processes("-L")) >= 1
    process.kill()
    await process.communicate()
    await until(lambda: not machine.processes())
