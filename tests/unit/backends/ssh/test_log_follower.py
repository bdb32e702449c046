"""Following a server's log over ssh: every line once, over connections that break and logs that are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from art.backends.ssh import log_follower
from art.backends.ssh.log_follower import LogFollower
from art.backends.ssh.ssh import Ssh
from art.errors import MachineError, UnreachableError
from tests.support.fake_ssh import FakeMachine

FOLDER = "~/.art/servers/default"
OUT_OF_REACH = "ssh: connect to host box port 22: No route to host"


class Follower:
    """A log on the machine, and what was shown of it."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        self.log = machine.server_folder / "server.log"
        self.shown = b""
        self.said: list[str] = []

    def add(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(text)

    def replace(self) -> None:
        """Begin a new file, as the keeper does with a log that is too large."""
        self.log.replace(self.log.with_suffix(".log.old"))
        self.log.touch()

    def make(self, num_lines: int) -> LogFollower:
        return LogFollower(Ssh("box"), FOLDER, num_lines=num_lines, write=self._write, say=self.said.append)

    def _write(self, piece: bytes) -> None:
        self.shown += piece

    @asynccontextmanager
    async def following(self, *, num_lines: int = 50) -> AsyncIterator[asyncio.Task[None]]:
        task: asyncio.Task[None] = asyncio.create_task(self.make(num_lines).run())
        try:
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, MachineError):
                await task

    def tails(self) -> list[int]:
        """Process ids of `tail` on the machine. The command line of ssh has the script, which names it too."""
        return [pid for pid, line in self.machine.processes().items() if re.match(r"tail -c \+\d", line)]

    async def runs(self) -> None:
        """Wait until the log is followed: what is added before is one of the lines that are there already."""
        await until(lambda: bool(self.tails()), self.machine.processes)

    async def shows(self, text: str) -> None:
        await until(lambda: self.shown.decode() == text, lambda: (self.shown, self.said))

    async def says(self, text: str, times: int = 1) -> None:
        await until(lambda: sum(text in line for line in self.said) == times, lambda: self.said)

    def cut(self) -> None:
        """Kill the ssh process with everything that it started, as a lost connection does on both sides."""
        for pid in self.tails():
            os.killpg(os.getpgid(pid), signal.SIGKILL)


async def until(is_so: Callable[[], bool], state: Callable[[], object]) -> None:
    try:
        async with asyncio.timeout(60):
            while not is_so():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(state()) from None


@pytest.fixture
def follower(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> Follower:
    monkeypatch.setattr(log_follower, "FIRST_DELAY_S", 0.01)
    return Follower(machine)


@pytest.mark.parametrize(("num_lines", "first"), [(2, "two\nthree\n"), (50, "one\ntwo\nthree\n"), (0, "")])
async def test_the_last_lines_come_first_and_then_what_is_added(follower: Follower, num_lines: int, first: str) -> None:
    follower.add("one\ntwo\nthree\n")
    async with follower.following(num_lines=num_lines):
        await follower.runs()
        await follower.shows(first)
        follower.add("half a li")
        await follower.shows(f"{first}half a li")
        follower.add("ne \u00e4\n")
        await follower.shows(f"{first}half a line \u00e4\n")
    assert follower.said == []


async def test_an_empty_log_is_followed(follower: Follower) -> None:
    follower.add("")
    async with follower.following():
        await follower.runs()
        follower.add("first\n")
        await follower.shows("first\n")


async def test_a_lost_connection_loses_and_repeats_no_byte(follower: Follower) -> None:
    follower.add("one\n")
    async with follower.following():
        await follower.shows("one\n")
        expected = "one\n"
        for number in range(3):
            follower.machine.set_problem(OUT_OF_REACH)
            follower.cut()
            await follower.says("the connection is lost; trying again until Ctrl-C", number + 1)
            num_calls = len(follower.machine.calls())
            follower.add(f"while it was lost {number}\nhalf")
            await until(lambda n=num_calls: len(follower.machine.calls()) > n + 1, follower.machine.calls)  # type: ignore[misc]
            follower.machine.set_problem()
            await follower.says("connected again", number + 1)
            follower.add(" a line\n")
            expected += f"while it was lost {number}\nhalf a line\n"
            await follower.shows(expected)


async def test_the_end_of_tail_alone_is_a_lost_connection(follower: Follower) -> None:
    follower.add("one\n")
    async with follower.following():
        await follower.shows("one\n")
        for pid in follower.tails():
            os.kill(pid, signal.SIGKILL)
        await follower.says("the connection is lost")
        follower.add("two\n")
        await follower.shows("one\ntwo\n")


async def test_a_log_that_is_replaced_is_followed(follower: Follower) -> None:
    follower.add("one\n")
    async with follower.following():
        await follower.shows("one\n")
        follower.replace()
        follower.add("new\n")
        await follower.shows("one\nnew\n")
        assert follower.said == []


async def test_a_log_that_is_replaced_while_nobody_looks_is_read_from_its_beginning(follower: Follower) -> None:
    follower.add("one\n")
    async with follower.following(num_lines=1):
        await follower.shows("one\n")
        follower.machine.set_problem(OUT_OF_REACH)
        follower.cut()
        await follower.says("the connection is lost")
        follower.replace()
        follower.add("new, and longer than before\nnewer\n")
        follower.machine.set_problem()
        await follower.shows("one\nnew, and longer than before\nnewer\n")


async def test_a_log_that_was_emptied_is_read_from_its_beginning(follower: Follower) -> None:
    follower.add("one\ntwo\n")
    async with follower.following():
        await follower.shows("one\ntwo\n")
        follower.machine.set_problem(OUT_OF_REACH)
        follower.cut()
        await follower.says("the connection is lost")
        follower.log.write_text("new\n", encoding="utf-8")
        follower.machine.set_problem()
        await follower.shows("one\ntwo\nnew\n")


async def test_what_cannot_be_followed_is_said_at_once(follower: Follower) -> None:
    with pytest.raises(MachineError, match=r"there is no log in ~/\.art/servers/default on box; the server was never"):
        await follower.make(50).run()
    follower.add("one\n")
    follower.machine.set_problem(OUT_OF_REACH)
    with pytest.raises(UnreachableError, match="box cannot be reached over ssh"):
        await follower.make(50).run()
    assert (follower.said, follower.shown) == ([], b"")


async def test_a_machine_that_lets_nobody_in_any_more_ends_it(follower: Follower) -> None:
    follower.add("one\n")
    async with follower.following() as task:
        await follower.shows("one\n")
        follower.machine.set_problem("alice@box: Permission denied (publickey).")
        follower.cut()
        with pytest.raises(MachineError, match="it does not let you in"):
            await task


@pytest.mark.parametrize("greeting", ['echo "welcome to box"', 'printf "welcome to box: "'])
async def test_what_a_login_shell_prints_is_left_out(follower: Follower, machine: FakeMachine, greeting: str) -> None:
    follower.add("one\n")
    machine.set_program("sh", f'{greeting}\nexec {Path("/bin/sh")} "$@"')
    async with follower.following():
        await follower.shows("one\n")


async def test_cancelling_leaves_nothing_there(follower: Follower) -> None:
    follower.add("one\n")
    async with follower.following() as task:
        await follower.shows("one\n")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: follower.machine.processes("tail ") == {}, follower.machine.processes)


async def test_the_end_of_the_connection_ends_tail_on_the_machine(follower: Follower) -> None:
    """A machine notices a lost connection by the end of the command's standard input; the log may be quiet for days."""
    follower.add("one\n")
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", follower.make(50)._script(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={"HOME": str(follower.machine.home), "PATH": "/usr/bin:/bin"}, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"art-log ")
    assert await process.stdout.readline() == b"one\n"
    process.stdin.close()
    async with asyncio.timeout(60):
        await process.wait()
    await until(lambda: follower.machine.processes("tail ") == {}, follower.machine.processes)
