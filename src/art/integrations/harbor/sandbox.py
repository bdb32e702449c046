"""Runs commands of a model apart from the user's files: in Linux namespaces of their own, made by util-linux.

    async with open_sandbox(Limits(disk_mb=256)) as sandbox:
        await sandbox.put(tar)                               # files, as a tar archive with paths from /
        finished = await sandbox.run("ls -l", cwd="/app", timeout_s=10)

Inside there is a fresh root in memory. `/usr` (with `/bin` and `/lib`) is the system's, to read only. There are no
files of the user, no network but loopback, no processes but its own, and no rights over the kernel. As the user root,
everything runs as the user 65534. Nothing is left when the sandbox is closed, or when this process is killed: a watcher
outside sees the end of its input and kills the first process inside, and the kernel ends all others with it.
`sandbox.sh` makes the root.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from art.errors import ConfigError, ToolServerError
from art.integrations.harbor.output import CutOutput, output_pipe

PROGRAMS = ("unshare", "nsenter", "setpriv", "findmnt", "mount", "umount", "pivot_root", "bash", "tar", "timeout")
"""Programs that the machine needs, of util-linux, bash, tar and coreutils."""
NOBODY = 65534
"""User that commands run as outside, if ART runs as root."""
MAX_PROCESSES = 256
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SCRIPT = Path(__file__).with_name("sandbox.sh")
_NO_RIGHTS = ("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all")
_WATCH = (
    '"$@" & child=$!; read -r _; '
    "inside=$(cat /proc/$child/task/$child/children 2> /dev/null); kill -KILL ${inside:-$child}; wait $child"
)
"""Script of the watcher: starts a command, and kills the command's child when its own input ends."""
_START_S = 30.0
_GRACE_S = 5.0
"""Time after its limit in which a command must have ended; then all processes of the sandbox are killed."""
_DRAIN_S = 0.2
"""Time for the rest of the output after a command has ended, whose background processes may keep it open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What commands in a sandbox may use."""

    disk_mb: int = 512
    """Size of all files that can be written. They lie in memory."""
    memory_mb: int = 2048
    """Address space of each process."""
    output_bytes: int = 65536
    """Bytes of a command's output that are kept: the first and the last half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result of a command."""

    code: int
    """Exit code; 137 if it was killed, e.g. at its time limit."""
    output: str
    """Standard output and standard error together."""
    timed_out: bool


class Sandbox:
    """An open sandbox. Commands may run at the same time, and background processes go on until it is closed."""

    def __init__(self, pid: int, limits: Limits) -> None:
        """
        Args:
            pid: the first process inside, by its number outside.
        """
        self._pid, self._limits = pid, limits

    async def put(self, archive: bytes) -> None:
        """Unpack a tar archive at the root.

        Raises:
            ToolServerError: it does not fit, or would overwrite a folder of the system.
        """
        finished = await self._enter(["tar", "-xf", "-", "-C", "/", "--no-same-owner"], archive, timeout_s=120.0)
        if finished.code:
            raise ToolServerError(f"files could not be copied into the sandbox: {finished.output.strip()[-500:]}")

    async def run(
        self, script: str, *, cwd: str = "/", env: Mapping[str, str] | None = None, timeout_s: float
    ) -> Finished:
        """Run a script with bash. Its standard input is empty."""
        variables = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", **(env or {})}
        seconds = f"{max(timeout_s, 0.1):.2f}"
        inner = ["env", "-i", *(f"{key}={value}" for key, value in variables.items())]
        # A script may be longer than an argument can be, so it comes by standard input, which the script itself lacks.
        inner += ["timeout", "-s", "KILL", seconds, "bash", "-c", 'eval "$(cat)" < /dev/null']
        limits = f"ulimit -c 0 -u {MAX_PROCESSES} -v {self._limits.memory_mb * 1024}"
        prepare = f"{limits}; echo 1000 > /proc/self/oom_score_adj; cd {shlex.quote(cwd)} && exec {shlex.join(inner)}"
        return await self._enter(["bash", "-c", prepare], script.encode(errors="replace"), timeout_s=timeout_s)

    async def kill_all(self) -> None:
        """Kill every process inside, except the first one, which holds the sandbox open."""
        await self._enter(["bash", "-c", "kill -KILL -1"], b"", timeout_s=_GRACE_S, kills=False)

    async def _enter(self, command: list[str], stdin: bytes, *, timeout_s: float, kills: bool = True) -> Finished:
        namespaces = ("--user", "--preserve-credentials", "--mount", "--pid", "--net", "--ipc", "--uts")
        entering = ("nsenter", "--target", str(self._pid), *namespaces, "--", *_NO_RIGHTS)
        output, started = CutOutput(self._limits.output_bytes), time.monotonic()
        with output_pipe(output) as (at_end, writing_end):
            process = await _start(*entering, *command, output=writing_end)
            assert process.stdin is not None
            writing = asyncio.create_task(_write(process.stdin, stdin))
            is_stuck = False
            try:
                async with asyncio.timeout(timeout_s + _GRACE_S):
                    await process.wait()
            except TimeoutError:
                is_stuck = True
                if kills:
                    await self.kill_all()
            finally:
                await asyncio.wait([at_end, writing], timeout=_DRAIN_S)
                writing.cancel()
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        code = 137 if process.returncode in (None, -9) else process.returncode or 0
        timed_out = is_stuck or (code == 137 and time.monotonic() - started >= timeout_s)
        return Finished(code=code, output=output.text(), timed_out=timed_out)


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
    stream.close()


@contextlib.asynccontextmanager
async def open_sandbox(limits: Limits) -> AsyncIterator[Sandbox]:
    """Open a sandbox, and close it with everything in it.

    Raises:
        ConfigError: this machine cannot make one.
        ToolServerError: it took too long, e.g. because the machine is overloaded.
    """
    holder = await _start("sh", "-c", _WATCH, "watcher", *_command(limits, "wait"))
    pid: int | None = None
    try:
        pid = await _first_process(holder)
        yield Sandbox(pid, limits)
    finally:
        await asyncio.shield(_end(holder, pid))


async def _first_process(holder: asyncio.subprocess.Process) -> int:
    """Wait until the sandbox is there. Returns the process that holds it, by its number outside."""
    assert holder.stdout is not None
    assert holder.stdin is not None
    try:
        async with asyncio.timeout(_START_S):
            line = await holder.stdout.readline()
            if not line.startswith(b"ready "):
                holder.stdin.close()  # the watcher, which has the output open too, ends with its input
                raise _no_sandbox((line + await holder.stdout.read()).decode(errors="replace"))
    except TimeoutError:
        raise ToolServerError(f"a sandbox was not there after {_START_S:g} s") from None
    return int(line.split()[1])


async def _end(holder: asyncio.subprocess.Process, pid: int | None) -> None:
    """Let the watcher end the sandbox. It returns when the kernel has ended all processes inside."""
    assert holder.stdin is not None
    holder.stdin.close()
    try:
        async with asyncio.timeout(_GRACE_S):
            await holder.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            holder.kill()
        await holder.wait()


def check_sandbox() -> None:
    """Check that this machine can make a sandbox.

    Raises:
        ConfigError: it cannot; the message says what is missing.
    """
    if sys.platform != "linux":
        raise _no_sandbox(f"namespaces are a part of Linux, and this is {sys.platform}")
    if missing := [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]:
        raise _no_sandbox(f"there is no {', '.join(missing)} (util-linux, bash, tar and coreutils have them)")
    _try_once()


@functools.cache
def _try_once() -> None:
    """Make a sandbox, once in this process if that succeeds."""
    done = subprocess.run(
        [*_as_nobody(), *_command(Limits(disk_mb=8), "end")], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env={"PATH": _PATH}, cwd="/", timeout=_START_S, check=False,
    )  # fmt: skip
    if not done.stdout.startswith("ready "):
        raise _no_sandbox(done.stdout + done.stderr)


def _command(limits: Limits, then: Literal["wait", "end"]) -> list[str]:
    """The command that makes namespaces and runs `sandbox.sh` in them."""
    namespaces = ("--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts")
    script = _SCRIPT.read_text(encoding="utf-8")  # a user without rights may not be able to read the file
    inside = ["sh", "-c", script, "sandbox", str(limits.disk_mb), then]
    return ["unshare", *namespaces, "--fork", "--kill-child", "--", *inside]


def _as_nobody() -> list[str]:
    """Words before a command that give up the rights of the user root."""
    if os.geteuid():
        return []
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]


async def _start(*command: str, output: int = asyncio.subprocess.PIPE) -> asyncio.subprocess.Process:
    """Start a program without the user's environment. An `output` that is a file descriptor is closed here."""
    try:
        return await asyncio.create_subprocess_exec(
            *_as_nobody(), *command, stdin=asyncio.subprocess.PIPE, stdout=output, stderr=asyncio.subprocess.STDOUT,
            env={"PATH": _PATH}, cwd="/",
        )  # fmt: skip
    finally:
        if output >= 0:
            os.close(output)


def _no_sandbox(reason: str) -> ConfigError:
    return ConfigError(
        "commands of a model run only in a sandbox, and this machine cannot make one: "
        f"{' '.join(reason.split())[-400:] or 'no answer'}. It needs Linux with user namespaces for this user (in a "
        "container, start it with rights to make them), or run Harbor itself and let its agent use ART's address: "
        "docs/rollouts.md"
    )
