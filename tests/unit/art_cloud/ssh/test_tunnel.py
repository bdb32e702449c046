"""`Tunnel`: a local address that stays while connections die."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from art.errors import MachineError
from art_cloud.ssh import Ssh, Tunnel
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


async def test_a_port_that_the_user_chose_and_another_program_has_is_named(machine: FakeMachine, port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        link = Tunnel(Ssh("box"), port, local_port=taken.getsockname()[1])
        with pytest.raises(MachineError, match=f"port {link.local_port} of this machine is in use"):
            await link.open()
    assert machine.processes() == {}


@pytest.mark.parametrize("prints", ["", "welcome", "\\033]0;title\\007", "welcome\\n", "\\377\\n"])
async def test_any_login_shell_will_do_also_one_that_prints_when_it_starts(
    machine: FakeMachine, port: int, prints: str
) -> None:
    machine.set_foreign_shell() if not prints else machine.set_shell(f"printf '{prints}'; printf '{prints}' >&2")
    link = Tunnel(Ssh("box"), port)
    await link.open()
    assert await word_of(link.local_port) == b"hello"
    link.close()


async def test_a_machine_that_does_not_let_us_in_is_not_asked_for_ever(machine: FakeMachine) -> None:
    machine.set_problem("Host key verification failed.")
    with pytest.raises(MachineError, match="Host key verification failed"):
        await Tunnel(Ssh("box"), 1).open()


async def test_a_program_that_is_killed_leaves_no_tunnel(machine: FakeMachine, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio\nfrom art_cloud.ssh import Ssh, Tunnel\n"
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
