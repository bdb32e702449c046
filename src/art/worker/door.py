"""The door of a server: where engine and trainer workers on other machines connect to it, by TCP with TLS.

    worker                                             door
    hello: kind, machine, versions, ticket, nonce  -->
                                                   <-- its proof of the key for that nonce, and a nonce
    its proof of the key for that nonce            -->
                                                   <-- welcome
    ... waits until it is needed                   <-- start: the program, its threads and variables
    then frames of the child, as over a socket pair, in both directions

A proof is HMAC-SHA256 with the worker key over the role, the nonce and the hash of the door's certificate. Both sides
then know that the other has the key, and that nobody is between them, who would have to show another certificate.
The certificate is made when the door opens and needs no authority. The key opens nothing but this door.

`DoorLauncher` gives a child to a worker that waits; `art.worker.agent` is the program at the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import ssl
import struct
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast

import art
from art.errors import ConfigError, ProcessError
from art.protocol.rpc import RpcClient
from art.storage.logs import open_log
from art.worker.launch import Process, Program

logger = logging.getLogger(__name__)

WorkerKind = Literal["engine", "trainer"]
PROTOCOL = 1
"""Version of the greeting and of the frames after it."""
KEY_VARIABLE = "ART_WORKER_KEY"
MIN_KEY_LENGTH = 16
GREETING_TIMEOUT_S = 10.0
_MAX_GREETING_BYTES = 2**16
_LENGTH = struct.Struct(">I")
_KEEP_ALIVE_S = 10
"""Seconds of silence after which the system asks whether the other side is still there."""
_CERTIFICATE_DAYS = 3650
LOST = 255
"""Exit status of a child whose worker is gone without a word."""


def own_versions() -> dict[str, str]:
    """Return what must be the same on both sides of the door. A local part as in torch 2.13.0+cu130 does not count."""
    versions = {"protocol": str(PROTOCOL), "art": art.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["torch"] = metadata.version("torch").partition("+")[0]
    return versions


def worker_key() -> str:
    """Return the worker key of the environment. Raises `ConfigError` if there is none, or one that can be guessed."""
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"set {KEY_VARIABLE} to the same secret on the server and on each worker, at least {MIN_KEY_LENGTH} "
            "characters, e.g. the output of `openssl rand -hex 32`"
        )
    return key


def prove(key: str, role: Literal["door", "worker"], nonce: str, certificate: bytes) -> str:
    """Return the proof that one side has the key; see the module. `certificate` is the door's, in DER."""
    text = f"{role} {nonce} {hashlib.sha256(certificate).hexdigest()}"
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read one message of the greeting. Raises `ConnectionError` if the other side sends none."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > _MAX_GREETING_BYTES:
            raise ConnectionError("the other side does not speak ART's worker protocol")
        message: dict[str, Any] = json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ValueError) as error:
        raise ConnectionError(f"the connection ended in the greeting ({error})") from error
    return message


def write_message(writer: asyncio.StreamWriter, **message: Any) -> None:
    body = json.dumps(message).encode()
    writer.write(_LENGTH.pack(len(body)) + body)


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Let the system notice a machine that is gone without closing its connections."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _KEEP_ALIVE_S), ("TCP_KEEPINTVL", _KEEP_ALIVE_S // 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS has other names
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker that has proved itself at the door."""

    kind: WorkerKind
    machine: str
    pid: int
    ticket: str | None
    """What the server has given it to be recognised by; `None` for one that somebody started by hand."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    since: float = field(default_factory=time.time)

    def __str__(self) -> str:
        return f"{self.kind} worker {self.pid} on {self.machine}"


class WorkerDoor:
    """Accepts workers, and keeps those that wait. It belongs to one event loop."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._certificate = b""
        self._server: asyncio.Server | None = None
        self._waiting: list[Worker] = []
        self._busy: dict[Worker, RpcClient] = {}
        self._arrived = asyncio.Condition()
        self._watches: dict[Worker, asyncio.Task[None]] = {}
        self._greetings: set[asyncio.Task[None]] = set()
        self.num_lost = 0
        """Workers whose connection ended, whether they waited or worked."""

    async def open(self, host: str, port: int) -> None:
        """Listen on an address; port 0 takes a free one.

        Raises:
            ConfigError: the address cannot be used, or the package `cryptography` is missing.
        """
        context, self._certificate = _make_certificate()
        try:
            self._server = await asyncio.start_server(self._let_knock, host, port, ssl=context)
        except OSError as error:
            raise ConfigError(
                f"cannot listen for workers on {host}:{port}: {error.strerror}; choose another"
            ) from error

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def status(self) -> list[dict[str, Any]]:
        """The workers that wait and those that work."""
        for worker, client in list(self._busy.items()):
            if client.closed:
                del self._busy[worker]
        return [
            {"kind": one.kind, "machine": one.machine, "pid": one.pid, "state": state, "since": one.since}
            for state, group in (("waiting", self._waiting), ("working", self._busy))
            for one in group
        ]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = [*self._greetings, *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._waiting:
            worker.writer.close()

    def _let_knock(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = asyncio.create_task(self._greet(reader, writer), name="greet a worker")
        self._greetings.add(greeting)
        greeting.add_done_callback(self._greetings.discard)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a worker in, or say why not."""
        peer = writer.get_extra_info("peername")
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                hello = await read_message(reader)
                if refusal := self._why_not(hello):
                    write_message(writer, refused=refusal)
                    raise ConnectionError(refusal)
                nonce = secrets.token_hex(16)
                write_message(writer, proof=prove(self._key, "door", hello["nonce"], self._certificate), nonce=nonce)
                answer = await read_message(reader)
                if not hmac.compare_digest(answer["proof"], prove(self._key, "worker", nonce, self._certificate)):
                    write_message(writer, refused=f"the worker key is not the server's: set {KEY_VARIABLE} to that")
                    raise ConnectionError("it has another key")
                write_message(writer, welcome=True)
                await writer.drain()
        except (OSError, TimeoutError, KeyError, TypeError) as error:
            logger.warning("a worker from %s was not let in: %s", peer, error or type(error).__name__)
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()
            return
        keep_alive(writer.transport)
        worker = Worker(
            kind=hello["kind"], machine=hello["machine"], pid=hello["pid"], ticket=hello["ticket"], reader=reader,
            writer=writer,
        )  # fmt: skip
        logger.info("%s has come", worker)
        self._watches[worker] = asyncio.create_task(self._watch(worker), name=f"watch {worker}")
        async with self._arrived:
            self._waiting.append(worker)
            self._arrived.notify_all()

    @staticmethod
    def _why_not(hello: Mapping[str, Any]) -> str | None:
        theirs, ours = hello["versions"], own_versions()
        different = [
            f"{name} {theirs.get(name, 'missing')} there and {ours[name]} here"
            for name in ours
            if theirs.get(name) != ours[name]
        ]
        return f"other versions: {'; '.join(different)}. Install the same on both machines" if different else None

    async def _watch(self, worker: Worker) -> None:
        """Notice that a waiting worker is gone: it sends nothing, so a read ends only then."""
        with contextlib.suppress(OSError):
            await worker.reader.read(1)
        if worker in self._waiting:
            self._waiting.remove(worker)
            del self._watches[worker]
            self.num_lost += 1
            logger.warning("%s is gone", worker)
        worker.writer.close()

    async def take(self, kind: WorkerKind, ticket: str | None, timeout_s: float) -> Worker:
        """Wait for a worker of a kind, with that ticket.

        Raises:
            ProcessError: none came in time.
        """

        def found() -> Worker | None:
            return next((one for one in self._waiting if (one.kind, one.ticket) == (kind, ticket)), None)

        try:
            async with asyncio.timeout(timeout_s), self._arrived:
                worker = await self._arrived.wait_for(found)
                assert worker is not None
                self._waiting.remove(worker)
        except TimeoutError:
            there = ", ".join(map(str, self._waiting)) or "none"
            raise ProcessError(
                f"no {kind} worker has come within {timeout_s:.0f} s; waiting are: {there}. Start one with `art worker "
                f"{kind} --server HOST:{self.port}`"
            ) from None
        watch = self._watches.pop(worker)
        watch.cancel()
        try:
            await asyncio.wait([watch])  # to await the watch itself would confuse its cancellation with the caller's
        except asyncio.CancelledError:
            worker.writer.close()  # nobody has it now, so it dials again
            raise
        return worker

    def start(self, worker: Worker, program: Program, client: RpcClient, **more: Any) -> Process:
        """Let a worker run a program, with `client` at this end of its frames. `more` goes to the worker as it is."""
        write_message(
            worker.writer, start=program.module, num_threads=program.num_threads, variables=dict(program.variables),
            **more,
        )  # fmt: skip
        client.take_over(cast("asyncio.Transport", worker.writer.transport))
        self._busy[worker] = client
        return RemoteProcess(worker, client, program.log_path, self)


class RemoteProcess:
    """A child that a worker runs on another machine."""

    def __init__(self, worker: Worker, client: RpcClient, log_path: Path, door: WorkerDoor) -> None:
        self.pid = worker.pid
        self.returncode: int | None = None
        self._worker, self._client, self._log_path, self._door = worker, client, log_path, door
        client.on_control = self._take_news

    def _take_news(self, message: dict[str, Any]) -> None:
        """Note the end of the child, with the last lines that it printed there."""
        self.returncode = message["returncode"]
        self._write_log(message["log"])

    def _write_log(self, text: str) -> None:
        with open_log(self._log_path) as log:
            log.write(text.encode() + b"\n")

    async def wait(self) -> int:
        await self._client.ended.wait()
        if self.returncode is None:
            self._door.num_lost += 1
            self.returncode = LOST
            self._write_log(f"the connection to {self._worker} was lost")
        return self.returncode

    def send_signal(self, signal: int, /) -> None:
        self._client.control(worker="signal", number=signal)

    def kill(self) -> None:
        """Give the worker up. It ends the child when its connection has ended, or when its machine goes on."""
        self._client.abort()


@dataclass(frozen=True, slots=True)
class DoorLauncher:
    """Runs a child on a worker that somebody has started, which sees the server's data directory under its path."""

    door: WorkerDoor
    kind: WorkerKind
    folder: Path
    """Folder of the data directory for the file by which a worker shows that it sees it."""

    async def start(self, program: Program, client: RpcClient, timeout_s: float) -> Process:
        worker = await self.door.take(self.kind, None, timeout_s)
        token = secrets.token_hex(16)
        check = self.folder / token
        self.folder.mkdir(exist_ok=True)
        check.write_text(token, encoding="utf-8")
        return self.door.start(worker, program, client, sees={"path": str(check), "token": token})

    async def close(self) -> None:
        """Do nothing: the worker dials again by itself, and waits for others."""


def _make_certificate() -> tuple[ssl.SSLContext, bytes]:
    """Return a TLS context with a new certificate that is signed by itself, and that certificate in DER."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigError(
            "workers on other machines need the package `cryptography`: pip install "
            "'agent-reinforcement-trainer[cluster]'"
        ) from error
    private, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ART worker door")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_CERTIFICATE_DAYS))
        .sign(private, hashes.SHA256())
    )
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile(prefix="art-door-") as file:  # `ssl` reads files only; this one is the owner's
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate.public_bytes(serialization.Encoding.DER)
