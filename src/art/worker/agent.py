"""`art worker`: run an engine or a trainer on this machine for a server elsewhere.

    server <-- TCP, TLS --> this program <-- socket pair --> engine or trainer

It dials the server's door, proves that it has the worker key and waits to be needed. Then it starts the same program
that the server starts at home, passes frames on, and tells how the program ended. It dials again after that, and after
each loss of the connection, for as long as it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import ssl
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

from art.backoff import Backoff
from art.errors import ConfigError
from art.storage.logs import log_tail, log_to_stderr, open_log
from art.worker.door import (
    GREETING_TIMEOUT_S,
    KEY_VARIABLE,
    WorkerKind,
    keep_alive,
    own_versions,
    prove,
    read_message,
    worker_key,
    write_message,
)
from art.worker.launch import child_environment, until_exit

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct(">I")
_CHUNK_BYTES = 2**18
_PROGRAMS = {
    "engine": ("art.worker.engine_child", "art.worker.vllm_child"),
    "trainer": ("art.worker.trainer_child",),
}
"""The programs that a worker of each kind runs, and no others."""


class WorkerAgent:
    """Works for the server behind one door, until it is cancelled."""

    def __init__(
        self, kind: WorkerKind, address: str, key: str, *, ticket: str | None = None, log_dir: Path | None = None
    ) -> None:
        """
        Args:
            address: HOST:PORT of the door.
            ticket: what the server gave this worker to be recognised by.
            log_dir: folder for what the program prints; by default a temporary one.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"the address of a server's door is HOST:PORT, like 10.0.0.5:5001; got {address!r}")
        self._kind, self._host, self._port = kind, host.strip("[]"), int(port)
        self._key, self._ticket = key, ticket
        self._log_dir = log_dir or Path(tempfile.mkdtemp(prefix="art-worker-"))

    async def run(self) -> None:
        """Dial, work and dial again.

        Raises:
            ConfigError: the server refused this worker.
        """
        backoff, num_failures = Backoff(first_s=0.5, longest_s=10.0), 0
        while True:
            try:
                await self._work_once()
                num_failures = 0
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                num_failures += 1
                pause_s = backoff.pause_s(num_failures)
                where = f"{self._host}:{self._port}"
                logger.warning("no connection to the server at %s (%s); trying again in %.1f s", where, error, pause_s)
                await asyncio.sleep(pause_s)

    async def _work_once(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the proof names the certificate
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=context)
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                await self._greet(reader, writer)
            keep_alive(writer.transport)
            logger.info("waiting for work at %s:%d", self._host, self._port)
            await self._run_program(await read_message(reader), reader, writer)
        finally:
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        nonce = secrets.token_hex(16)
        write_message(
            writer, kind=self._kind, machine=socket.gethostname(), pid=os.getpid(), versions=own_versions(),
            ticket=self._ticket, nonce=nonce,
        )  # fmt: skip
        answer = await _accepted(reader)
        if not hmac.compare_digest(answer["proof"], prove(self._key, "door", nonce, certificate)):
            raise ConfigError(
                f"the program at {self._host}:{self._port} does not have the worker key, or somebody is between it and "
                f"this machine: set {KEY_VARIABLE} to the server's"
            )
        write_message(writer, proof=prove(self._key, "worker", answer["nonce"], certificate))
        await _accepted(reader)

    async def _run_program(
        self, order: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        module, log_path = order["start"], self._log_dir / f"{self._kind}.log"
        if module not in _PROGRAMS[self._kind]:
            raise ConfigError(f"the server wants {module!r} of this {self._kind} worker, which does not run it")
        if (sees := order.get("sees")) is not None and (problem := _why_blind(**sees)):
            return write_message(writer, worker="ended", returncode=1, log=problem)
        ours, theirs = socket.socketpair()
        with theirs, open_log(log_path) as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, "--fd", str(theirs.fileno()), "--log", str(log_path),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=child_environment(order["num_threads"], order["variables"]),
            )  # fmt: skip
        child_reader, child_writer = await asyncio.open_connection(sock=ours)
        logger.info("running %s (pid %d)", module, process.pid)

        async def pass_orders() -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    header = await reader.readexactly(_LENGTH.size)
                    body = await reader.readexactly(_LENGTH.unpack(header)[0])
                    if body.startswith(b'{"worker"'):
                        with contextlib.suppress(ProcessLookupError):
                            process.send_signal(json.loads(body)["number"])
                        continue
                    child_writer.write(header + body)
                    await child_writer.drain()
            child_writer.close()  # the server is gone: the child leaves when its socket ends

        orders = asyncio.create_task(pass_orders(), name="orders to the child")
        try:
            with contextlib.suppress(OSError):
                while data := await child_reader.read(_CHUNK_BYTES):
                    writer.write(data)
                    await writer.drain()
            await until_exit(process)
            logger.info("%s has ended (%s)", module, process.returncode)
            with contextlib.suppress(OSError):
                write_message(writer, worker="ended", returncode=process.returncode, log=log_tail(log_path))
                await writer.drain()
        finally:
            orders.cancel()
            child_writer.close()
            await until_exit(process)


async def _accepted(reader: asyncio.StreamReader) -> dict[str, Any]:
    answer = await read_message(reader)
    if "refused" in answer:
        raise ConfigError(f"the server refuses this worker: {answer['refused']}")
    return answer


def _why_blind(path: str, token: str) -> str | None:
    """Why this machine does not see the server's data directory, by a file that the server has just written there."""
    check = Path(path)
    with contextlib.suppress(OSError):
        if check.read_text(encoding="utf-8") == token:
            check.unlink()
            return None
    folder = check.parent.parent
    return f"this worker does not see the server's data directory: mount {folder} on this machine at the same path"


# -- `art worker` --


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run engines or trainers on this machine for a server elsewhere, which was started with --cluster workers. The "
        f"worker key is read from {KEY_VARIABLE}. See docs/cluster.md."
    )
    parser.add_argument("kind", choices=get_args(WorkerKind), help="what this worker runs")
    parser.add_argument(
        "--server", required=True, metavar="HOST:PORT", help="address at which the server takes workers"
    )
    parser.add_argument("--log-dir", type=Path, help="folder for what the program prints (default: a temporary one)")


def run(args: argparse.Namespace) -> int:
    log_to_stderr()
    agent = WorkerAgent(args.kind, args.server, worker_key(), log_dir=args.log_dir)
    asyncio.run(agent.run())
    return 0
