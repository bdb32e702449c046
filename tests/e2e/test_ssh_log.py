"""A server's log followed with the real OpenSSH, while connections and the machine's ssh server are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from art.backends.ssh import log_follower
from art.backends.ssh.log_follower import LogFollower
from tests.support import ssh_machine
from tests.support.ssh_machine import SshMachine

FOLDER = "servers/default"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SshMachine]:
    if (lacking := ssh_machine.missing()) is not None:
        pytest.skip(lacking)
    machine = SshMachine(tmp_path)
    (machine.home / FOLDER).mkdir(parents=True)
    yield machine
    machine.close()


async def until(is_so: Callable[[], bool], state: Callable[[], object]) -> None:
    try:
        async with asyncio.timeout(120):
            while not is_so():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(state()) from None


def tails(machine: SshMachine) -> list[int]:
    return [pid for pid, line in machine.processes().items() if line.startswith("tail -c +")]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_every_line_comes_once_while_everything_in_between_is_killed(
    machine: SshMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_follower, "FIRST_DELAY_S", 0.1)
    log, said, lines = machine.home / FOLDER / "server.log", list[str](), [f"line {number}\n" for number in range(60)]
    shown = bytearray()

    def add(count: int) -> bytes:
        """Add the next lines, and return all that are there."""
        text = "".join(lines[:count])
        with log.open("a", encoding="utf-8") as file:
            file.write(text[log.stat().st_size :])
        return text.encode()

    async def shows(text: bytes) -> None:
        await until(lambda: bytes(shown) == text, lambda: (bytes(shown), said))

    log.touch()
    first = add(10)
    follower = LogFollower(machine.ssh(), f"~/{FOLDER}", num_lines=50, write=shown.extend, say=said.append)
    following = asyncio.create_task(follower.run())
    await shows(first)
    await shows(add(20))

    for pid in tails(machine):
        os.kill(pid, signal.SIGKILL)
    await shows(add(30))

    machine.stop_sshd()
    machine.kill_everything()
    await until(lambda: sum("connection is lost" in line for line in said) == 2, lambda: said)
    while_away = add(40)
    machine.start_sshd()
    await shows(while_away)
    assert [line for line in said if "connected again" in line] == ["gpu-box: connected again"] * 2

    log.replace(log.with_suffix(".old"))
    log.touch()
    log.write_text("a new file\n", encoding="utf-8")
    await shows(while_away + b"a new file\n")

    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    await until(lambda: tails(machine) == [], machine.processes)  # though the log is quiet
