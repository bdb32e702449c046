"""Start a vLLM server, wait until it can sample, and report its death.

A server listens on a free loopback port and requires a key. vLLM's development routes require no key, so a server that
needs them listens on a socket file instead, in a folder that only this user can open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

from art.engines.vllm.command import MODEL_NAME, Installation, server_environment
from art.engines.vllm.replica import Replica
from art.errors import ArtError, ProcessError

logger = logging.getLogger(__name__)

POLL_S = 0.2
CAUSE_WINDOW_S = 30.0
"""The first error that the server printed in this many seconds before its death is reported as the cause."""
DRAIN_TIMEOUT_S = 2.0
GUARD = Path(__file__).with_name("guard.py")
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:ERROR [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
"""The prefix of error lines and of lines printed without a logger. It leaves warnings with text before the cause."""
_CAUSE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: |$)|.* died unexpectedly")
_HINTS = {
    "module 'triton": "with adapters, vLLM needs Triton for mixtures of experts, and there is no working Triton here; "
    "vLLM's CPU package does not include it",
    "is not supported by MLA": "on CPU, vLLM supports multi-head latent attention only in the width of DeepSeek-V3: "
    "512 + 64",
}
"""Explanations of causes that are hard to understand, by a part of their text."""
_NO_CAUSE = re.compile(r"Engine core initialization failed|EngineDeadError|WorkerProc initialization failed")


class VllmServer:
    """A vLLM server that this process has started, and the `replica` that calls it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        replica: Replica,
        folder: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        self._process = process
        self._folder = folder
        self._errors: deque[tuple[float, str]] = deque(maxlen=50)
        self.replica = replica
        self._output = asyncio.get_running_loop().create_task(self._forward_output(), name="vllm-output")

    @classmethod
    async def start(
        cls, installation: Installation, command: list[str], num_threads: int | None, *, with_control: bool = False
    ) -> VllmServer:
        """Start a server and wait until it can sample.

        Args:
            with_control: open vLLM's development routes, to this user only.

        Raises:
            ProcessError: the server ended before it was ready. The message has the error that it printed.
        """
        key = secrets.token_urlsafe(24)
        if with_control:
            folder = tempfile.TemporaryDirectory(prefix="art-vllm-")
            path = Path(folder.name) / "socket"
            address, replica = f"--uds={path}", Replica("http://vllm", key, path)
        else:
            port, folder = _free_port(), None
            address, replica = f"--port={port}", Replica(f"http://127.0.0.1:{port}", key)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(GUARD), *command, address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=server_environment(installation, key, num_threads, with_control=with_control),
            start_new_session=True,
            limit=2**20,
        )
        server = cls(process, replica, folder)
        try:
            await server._until_ready()
        except BaseException:
            await server.close()
            raise
        return server

    @property
    def pid(self) -> int:
        """Process id of the guard, the parent of all processes of the server."""
        return self._process.pid

    async def close(self) -> None:
        await self._end()
        await self.replica.close()

    async def death(self) -> ProcessError:
        """Wait until the server is dead. Returns the reason, as far as it is known."""
        await self._exit()
        await self._end()  # the guard may have been killed alone
        recent = [text for at, text in self._errors if time.monotonic() - at < CAUSE_WINDOW_S]
        # The exit status tells nothing: it is that of the guard, which kills itself together with its group.
        hints = [f" ({hint})" for part, hint in _HINTS.items() if recent and part in recent[0]]
        return ProcessError("the vLLM server died" + (f": {recent[0]}" if recent else "") + "".join(hints))

    async def _exit(self) -> None:
        """Wait until the guard has ended. `Process.wait` would also wait for children that keep its output open."""
        while self._process.returncode is None:
            await asyncio.sleep(POLL_S)

    async def _end(self) -> None:
        """Kill the group, and read the output to its end, which comes when no process of the group is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._exit()
        await asyncio.wait([self._output], timeout=DRAIN_TIMEOUT_S)
        self._output.cancel()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._folder is not None:
            self._folder.cleanup()

    async def _until_ready(self) -> None:
        death = asyncio.ensure_future(self.death())
        try:
            while not await self.replica.is_healthy():
                await asyncio.wait([death], timeout=POLL_S)
                if death.done():
                    raise death.result()
            # The first request compiles and allocates. Do that now, so that it is not mistaken for a stall later.
            await self.replica.score([0, 0], MODEL_NAME)
        except ArtError as error:
            if death.done() or not isinstance(error, ProcessError):
                raise
            raise await death from error
        finally:
            death.cancel()

    async def _forward_output(self) -> None:
        """Copy the server's output to this process's log, and remember errors that may be the cause of a death."""
        assert self._process.stdout is not None
        while not self._process.stdout.at_eof():
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than the limit; asyncio has dropped the line
                line = b"[a very long line]\n"
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            text = _PREFIX.sub("", line.decode(errors="replace")).strip()
            if _CAUSE.match(text) and not _NO_CAUSE.search(text):
                self._errors.append((time.monotonic(), text[:1000]))


def _free_port() -> int:
    """Find a free port. If another program takes it before vLLM does, vLLM ends and is started again on another."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
