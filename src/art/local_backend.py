"""`LocalBackend`: an ART server on this machine, started and kept alive by the user's own process.

This process owns the listening socket and passes it to `art-server`. While the server restarts, new connections wait in
the socket's queue instead of being refused, and the address never changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import math
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self
from weakref import WeakKeyDictionary

from art.backend import Backend
from art.client.client import ServerClient
from art.config import ServerConfig
from art.config.losses import LOSS_PATH_VARIABLE
from art.config.server import FAILED_STARTS
from art.errors import ArtError, ConfigError, ProcessError
from art.platforms import check_server_platform
from art.protocol.keys import check_api_key
from art.storage.atomic import storage_errors
from art.storage.layout import DataDir
from art.storage.logs import describe_exit, log_tail, open_log, rotate_log

logger = logging.getLogger(__name__)

RESTARTS_PER_MINUTE = 6
"""Restarts of `art-server` within a minute. A further death within it fails the backend."""
START_TIMEOUT_S = 60.0
PINGS_PER_TIMEOUT = 4
"""Number of health requests in a row without an answer after which a server is killed. One may be the fault of this
process: code that blocks its event loop hides answers."""
LOG_CHECK_S = 60.0
STOP_TIMEOUT_S = 10.0


class LocalBackend(Backend):
    """Trains and serves on this machine, in separate processes; needs `pip install agent-reinforcement-trainer[local]`.

    Use it as `async with LocalBackend() as backend:`, or as `with LocalBackend() as backend:` around code that runs its
    own event loops, or call `close()`. If the user's process dies in any way, the server, engine and trainer end too;
    the next `LocalBackend` on the same `path` continues.
    """

    shares_files = True

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        server_config: ServerConfig | None = None,
        show_page: bool = True,
        cluster: str | None = None,
        in_process: bool = False,
        gpu_cost_per_hour_usd: float | None = None,
    ) -> None:
        """
        Args:
            path: data directory; by default `.art` in the current directory.
            server_config: limits and time-outs of the server. Host and port cannot be set.
            show_page: whether to print the address of the live page on standard error when the server has started. The
                address opens the page once, within 15 minutes; `art view` prints another.
            cluster: where engines and trainers run, in place of this machine; see `ServerConfig.cluster`.
            in_process: accepted for older code, without effect: engine and trainer are always separate processes.
            gpu_cost_per_hour_usd: older name of `Prices.device_usd_per_hour`, for models without such a price.

        Raises:
            ConfigError: `path` is a file, a price is below 0, `server_config` names a host or port, or this is Windows.
        """
        check_server_platform("LocalBackend")
        super().__init__()
        if in_process:
            logger.info("in_process=True has no effect: engine and trainer run in processes of their own")
        if gpu_cost_per_hour_usd is not None and not gpu_cost_per_hour_usd >= 0:
            raise ConfigError(f"gpu_cost_per_hour_usd must be 0 USD or more, got {gpu_cost_per_hour_usd!r}")
        self.device_usd_per_hour = gpu_cost_per_hour_usd
        config = server_config or ServerConfig()
        if cluster is not None:
            config = config.model_copy(update={"cluster": cluster})
        if config.host != "127.0.0.1" or config.port not in (0, ServerConfig().port):
            raise ConfigError(
                f"LocalBackend chooses a free loopback port itself; got host={config.host!r}, port={config.port}. "
                "Start `art-server` yourself to choose them"
            )
        self.path = Path(path or ".art").expanduser().resolve()
        there = next(place for place in (self.path, *self.path.parents) if place.exists())
        if not there.is_dir():
            what = "it" if there == self.path else str(there)
            raise ConfigError(
                f"LocalBackend(path={str(path or self.path)!r}) must be a folder for its data, but {what} is a file; "
                "give a folder, which is made if it does not exist",
                param="path",
            )
        self.data_dir = self.path
        # The server is the user's own, and so are its clients: they may run losses of their own in it.
        trusts = {} if "custom_losses" in config.model_fields_set else {"custom_losses": ("*",)}
        self._config = config.model_copy(update=trusts)
        own_key = check_api_key(os.environ.get("ART_API_KEY", ""))
        self._api_key = own_key or f"art-{secrets.token_urlsafe(24)}"
        self._shares_key = not own_key
        self._shows_page = show_page
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._client: ServerClient | None = None
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._failure: ProcessError | None = None
        self._has_answered = False
        """Whether the server has been waited for."""
        self._preloads = False
        self._watcher: asyncio.Task[None] | None = None
        self._cause: str | None = None
        """Reason why this process killed the last server."""
        self._restarts: list[float] = []

    @property
    def log_path(self) -> Path:
        """Path of the server's log file."""
        return DataDir(self.path).logs / "server.log"

    @property
    def server_pid(self) -> int | None:
        """Process id of the running server; `None` if there is none."""
        return self._process.pid if self._process and self._process.poll() is None else None

    async def _connection(self) -> ServerClient:
        """The client of the server, which is started if it does not run.

        Raises:
            ProcessError: the server does not start, or died again and again.
        """
        loop = asyncio.get_running_loop()
        async with self._locks.setdefault(loop, asyncio.Lock()):
            if self._failure is not None:
                raise self._failure
            try:
                self._start()
                assert self._client is not None
                if not self._has_answered:
                    await self._until_healthy()
            except BaseException:
                await self._stop()
                raise
            if self._shows_page and not self._has_answered:
                try:
                    link = await self._client.page_link()
                    # A progress bar keeps what is written to standard error above itself.
                    hint = f"(opens once; later: art view {shlex.quote(str(self.path))})"
                    sys.stderr.write(f"See it learn: {link}  {hint}\n")
                    sys.stderr.flush()
                except ArtError as error:  # the page is no reason to end a training
                    logger.warning("no link to the page: %s", error)
            self._has_answered = True
            # The watcher's loop may have ended: notebooks and scripts call `asyncio.run` several times.
            if self._watcher is None or self._watcher.done() or not self._watcher.get_loop().is_running():
                self._watcher = loop.create_task(self._keep_alive(), name="local-backend")
            return self._client

    async def open(self) -> ServerClient:
        """Start the server now, rather than with the first use. Returns a client of it."""
        return await self._connection()

    def start(self) -> None:
        """Start the server without waiting for it, if it does not run: it starts while this process does other work,
        and without GPUs it loads the libraries of engine and trainer, so that a first model is up sooner.

        The first use of the backend starts it too, and waits until it answers.
        """
        self._start(preload=True)

    def _start(self, *, preload: bool = False) -> None:
        if self._client is None:
            self._preloads = preload
            self._socket = socket.create_server(("127.0.0.1", 0), backlog=4096)
            port = self._socket.getsockname()[1]
            self._client = ServerClient(f"http://127.0.0.1:{port}", self._api_key)
            try:
                self._spawn()
            except BaseException:
                self._release()
                raise

    async def close(self) -> None:
        """Stop the server and its processes, and wait for their end."""
        try:
            await super().close()
        finally:
            await self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server and its processes, and wait for their end, even if an event loop runs in this thread."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self.close())
            return
        client, process = self._release()
        if process is not None:
            _terminate(process)

        async def close_connections() -> None:
            await super(LocalBackend, self).close()
            if client is not None:
                await client.close()

        closing = loop.create_task(close_connections(), name="local-backend-close")
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)

    def _spawn(self) -> None:
        assert self._socket is not None
        needed = ("uvicorn", "torch", "transformers", "peft")
        if missing := [name for name in needed if not importlib.util.find_spec(name)]:
            raise ConfigError(
                f"LocalBackend needs {', '.join(missing)}; install them with `pip install "
                "'agent-reinforcement-trainer[local]'`"
            )
        config_json = self._config.model_dump_json()
        # The key goes through a pipe: others could see it among the variables of a process.
        environment = {name: value for name, value in os.environ.items() if name != "ART_API_KEY"}
        with storage_errors(self.log_path, "opening"):
            log = open_log(self.log_path)
        with log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "art.cli.server", "--data-dir", str(self.path), "--config-json", config_json,
                    "--fd", str(self._socket.fileno()), "--die-with-parent", "--key-from-stdin",
                    *(["--share-key"] if self._shares_key else []), *(["--preload"] if self._preloads else []),
                ],
                # A new session, so that Ctrl-C in the terminal reaches only this process, which then closes the server.
                pass_fds=[self._socket.fileno()], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                env=environment | {LOSS_PATH_VARIABLE: _loss_path()},
            )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; its exit status is noticed
            self._process.stdin.write(f"{self._api_key}\n".encode())
            self._process.stdin.flush()

    async def _until_healthy(self) -> None:
        """Wait until the server answers. If it is killed meanwhile, it is started again.

        Raises:
            ProcessError: it ended, or does not answer within `START_TIMEOUT_S`; with the last lines of its log.
        """
        assert self._client is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        num_starts = 1
        health = asyncio.ensure_future(self._client.health())
        try:
            while True:
                await asyncio.wait([health], timeout=0.05)
                if health.done():
                    health.result()
                    return
                if self._process is None:
                    raise ProcessError("the backend was closed while its server started")
                if (status := self._process.poll()) is not None:
                    how = describe_exit(status)
                    # A server that exits by itself has a reason. One that a signal killed is started again.
                    if status >= 0 or num_starts >= FAILED_STARTS:
                        raise ProcessError(f"art-server ended at its start ({how}){log_tail(self.log_path)}")
                    num_starts += 1
                    logger.warning("art-server died at its start (%s): starting it again", how)
                    self._spawn()
                if time.monotonic() > deadline:
                    raise ProcessError(
                        f"art-server did not answer within {START_TIMEOUT_S:.0f} s{log_tail(self.log_path)}"
                    )
        finally:
            health.cancel()

    async def _keep_alive(self) -> None:
        """Restart the server when it dies or does not answer. Clients repeat the requests that were running."""

        async def keep_log_short() -> None:
            while True:
                await asyncio.sleep(LOG_CHECK_S)
                await asyncio.to_thread(rotate_log, self.log_path)

        helpers = [
            asyncio.create_task(self._end_if_silent(), name="local-backend-ping"),
            asyncio.create_task(keep_log_short(), name="local-backend-log"),
        ]
        try:
            await self._restart_if_dead()
        finally:
            for helper in helpers:
                helper.cancel()

    async def _end_if_silent(self) -> None:
        """Kill a server that does not answer for `heartbeat_timeout_s`: a signal stopped it, or its event loop is
        blocked. One that was restarted has at least `START_TIMEOUT_S` for its first answer."""
        ping_s = self._config.heartbeat_timeout_s / PINGS_PER_TIMEOUT
        process, num_missed, num_allowed = self._process, 0, PINGS_PER_TIMEOUT
        while self._client is not None:
            try:
                async with asyncio.timeout(ping_s):
                    await self._client.health()
                num_missed, num_allowed = 0, PINGS_PER_TIMEOUT
                await asyncio.sleep(ping_s)
            except TimeoutError:
                num_missed += 1
            except ArtError:  # closed, or another failure, which other calls will report
                await asyncio.sleep(ping_s)
            if self._process is not process:
                process, num_missed = self._process, 0
                num_allowed = max(PINGS_PER_TIMEOUT, math.ceil(START_TIMEOUT_S / ping_s))
            elif process is not None and num_missed == num_allowed:
                self._cause = f"it gave no answer for {num_missed * ping_s:.0f} s and was killed"
                process.kill()

    async def _restart_if_dead(self) -> None:
        """If it dies too often, fail the calls that wait for the server, and all further calls until `close`."""
        while True:
            await asyncio.sleep(0.1)
            if self._process is None or self._process.poll() is None:
                continue
            cause, self._cause = self._cause, None
            how = describe_exit(self._process.returncode) + (f"; {cause}" if cause else "")
            now = time.monotonic()
            self._restarts = [at for at in self._restarts if now - at < 60] + [now]
            if len(self._restarts) > RESTARTS_PER_MINUTE:
                self._failure = ProcessError(
                    f"art-server died {len(self._restarts)} times in a minute, the last time by {how}, and is not "
                    f"restarted{log_tail(self.log_path)}"
                )
                logger.error("%s", self._failure)
                if self._socket is not None:
                    self._socket.close()  # refuse further connections instead of letting them wait forever
                if self._client is not None:
                    await self._client.close(self._failure.message)
                return
            logger.warning("art-server died (%s): restarting it; nothing is lost", how)
            self._spawn()

    async def _stop(self) -> None:
        watcher = self._watcher
        client, process = self._release()
        if watcher is not None and watcher.get_loop() is asyncio.get_running_loop():
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        if client is not None:
            await client.close()
        if process is not None:
            await asyncio.to_thread(_terminate, process)

    def _release(self) -> tuple[ServerClient | None, subprocess.Popen[bytes] | None]:
        """Forget the server, so that the next call starts another. The caller closes its connections and process."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher.get_loop().is_running():  # perhaps in another thread
            watcher.get_loop().call_soon_threadsafe(watcher.cancel)
        client, self._client = self._client, None
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._failure, self._restarts, self._has_answered = None, [], False
        return client, process


_closing: set[asyncio.Task[None]] = set()
"""Tasks that close connections after a `with` block. They are kept here, because an event loop does not keep tasks."""


def _loss_path() -> str:
    """Folders where this process finds modules, for the trainer to find a custom loss in: also the script's folder."""
    before = os.environ.get(LOSS_PATH_VARIABLE, "").split(os.pathsep)
    own = [str(Path(folder).resolve()) for folder in sys.path if Path(folder).is_dir()]
    return os.pathsep.join(dict.fromkeys(folder for folder in [*before, *own] if folder))


def _terminate(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
