"""Starts a vLLM server, waits until it samples, and tells when it has died.

It listens on a free loopback port and asks for a key. One that ART has to control does not: vLLM's development routes
ask for no key, so it listens on a socket file in a folder that only this user can open.
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
"""The first error that it printed in this time before its death is taken for the cause; others follow from it."""
DRAIN_TIMEOUT_S = 2.0
GUARD = Path(__file__).with_name("guard.py")
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:ERROR [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
"""Of errors, and of what its processes print without a logger. Warnings keep theirs, and so do not match."""
_CAUSE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: |$)|.* died unexpectedly")
_HINTS = {
    "module 'triton": "vLLM computes mixtures of experts by Triton while adapters are enabled, and there is no working "
    "Triton here; its CPU package comes without",
    "is not supported by MLA": "on a CPU vLLM computes multi-head latent attention in the width of DeepSeek-V3 only: "
    "512 + 64",
}
"""What is meant by causes that only vLLM's developers understand, by a part of their text."""
_NO_CAUSE = re.compile(r"Engine core initialization failed|EngineDeadError|WorkerProc initialization failed")


class VllmServer:
    """One server that belongs to this process, and its `replica`."""

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
        """
        Args:
            with_control: open its development routes, to this user only.

        Raises:
            ProcessError: it ended before it was ready; with the error that it printed, if it did.
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
        """Of the guard, from which all its processes descend."""
        return self._process.pid

    async def close(self) -> None:
        self._kill()
        await self._exit()
        await self._drain()
        await self.replica.close()
        self._remove_folder()

    async def death(self) -> ProcessError:
        """Returns when the server is dead, with the reason as far as it is known."""
        await self._exit()
        self._kill()  # the guard may have been killed alone
        await self._drain()
        self._remove_folder()
        recent = [text for at, text in self._errors if time.monotonic() - at < CAUSE_WINDOW_S]
        # The status is that of the guard, which kills its group and itself with it.
        hints = [f" ({hint})" for part, hint in _HINTS.items() if recent and part in recent[0]]
        return ProcessError("the vLLM server died" + (f": {recent[0]}" if recent else "") + "".join(hints))

    async def _exit(self) -> None:
        """Returns when the guard is gone. `Process.wait` would also wait for the end of its output, which processes
        further below may keep open."""
        while self._process.returncode is None:
            await asyncio.sleep(POLL_S)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    async def _drain(self) -> None:
        """Read its output to the end, which comes when no process of the group is left."""
        await asyncio.wait([self._output], timeout=DRAIN_TIMEOUT_S)
        self._output.cancel()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def _until_ready(self) -> None:
        death = asyncio.ensure_future(self.death())
        try:
            while not await self.replica.is_healthy():
                await asyncio.wait([death], timeout=POLL_S)
                if death.done():
                    raise death.result()
            # The first request compiles and allocates; nobody should wait for that later, or take it for a stall.
            await self.replica.score([0, 0], MODEL_NAME)
        except ArtError as error:
            if death.done() or not isinstance(error, ProcessError):
                raise
            raise await death from error
        finally:
            death.cancel()

    async def _forward_output(self) -> None:
        """Copy its output to our log, and note the errors in it that may be the cause of a death."""
        assert self._process.stdout is not None
        while line := await self._read_line(self._process.stdout):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            text = _PREFIX.sub("", line.decode(errors="replace")).strip()
            if _CAUSE.match(text) and not _NO_CAUSE.search(text):
                self._errors.append((time.monotonic(), text[:1000]))

    @staticmethod
    async def _read_line(stream: asyncio.StreamReader) -> bytes:
        try:
            return await stream.readline()
        except ValueError:  # longer than the limit; what was read is gone
            return b"[a very long line]\n"


def _free_port() -> int:
    """Another program may take it before vLLM does, which then ends and is started again with another one."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
