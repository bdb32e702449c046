"""`SshBackend`: an ART server on any machine that ssh reaches, used from here.

art-server there?  -> tunnel -> health        first use: what is missing is installed and started
watch: the server does not answer -> start it again; the tunnel watches itself
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from weakref import WeakKeyDictionary

from art.backend import Backend
from art.backends.ssh.remote_server import Install, RemoteServer
from art.backends.ssh.ssh import Ssh
from art.backends.ssh.tunnel import Tunnel
from art.client import ArtClient
from art.config import ServerConfig
from art.errors import ArtError

logger = logging.getLogger(__name__)

PING_EVERY_S, PING_TIMEOUT_S = 2.0, 4.0
NUM_SILENT = 2
"""Number of pings in a row without an answer after which the server is started again, unless it runs."""
LONGEST_PAUSE_S = 30.0
"""Longest pause between two tries to start the server again."""


class SshBackend(Backend):
    """Trains and serves on another machine that needs ssh and Python only, and a GPU for models of some size.

    The first use installs ART there, into a folder of the account, starts `art-server` on the machine's loopback, and
    opens a tunnel to it. The server is started again whenever it dies, and the tunnel whenever it breaks. Closing the
    backend ends the tunnel; the server goes on with its jobs, and the next `SshBackend` of the same host and name finds
    it.
    """

    shares_files = False

    local_port: int | None = None
    """Port of this machine for the tunnel; by default a free one. Set it before the first use."""

    def __init__(
        self,
        host: str | Ssh,
        *,
        name: str = "default",
        install: Install | None = None,
        server_config: ServerConfig | None = None,
        stop_server: bool = False,
        show_progress: bool = True,
    ) -> None:
        """
        Args:
            host: `user@machine`, an alias of `~/.ssh/config`, or an `Ssh` with a configuration file of its own.
            name: name of the server among those of the account, each with its own environment and data directory.
            install: what is installed, and where; by default what this process runs, with the extra `local`.
            server_config: settings of the server. A server that already runs must have been started with the same.
            stop_server: whether `close` stops the server too.
            show_progress: whether to write lines about the installation and the start to standard error.

        Raises:
            ConfigError: the host, the name or a setting is malformed.
        """
        super().__init__()
        self.ssh = host if isinstance(host, Ssh) else Ssh(host)
        self.server = RemoteServer(self.ssh, name=name, install=install, config=server_config)
        """The server on the other machine, to look at its state and log."""
        self.tunnel: Tunnel | None = None
        """The tunnel; `None` before the first use and after `close`."""
        self._stops_server = stop_server
        self._shows_progress = show_progress
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._watcher: asyncio.Task[None] | None = None

    async def _connection(self) -> ArtClient:
        """The client of the server, which is installed, started and connected to if need be.

        Raises:
            ConfigError: there is no ssh program, or the server runs with other settings.
            MachineError, UnreachableError: the machine does not let us in, or ART cannot be installed or started there.
        """
        loop = asyncio.get_running_loop()
        async with self._locks.setdefault(loop, asyncio.Lock()):
            if self._client is None:
                started = time.monotonic()
                await self._find_machine()
                self._client = await self._connect()
                self._say(
                    f"{self.ssh.host}: ready at {self._client.base_url} after {time.monotonic() - started:.1f} s "
                    f"(data in {self.server.data_dir})"
                )
            if self._watcher is None or self._watcher.done() or not self._watcher.get_loop().is_running():
                self._watcher = loop.create_task(self._keep_alive(), name="ssh-backend")
            return self._client

    async def open(self) -> ArtClient:
        """Install, start and connect now, rather than with the first use. Returns a client of the server.

        Raises:
            ConfigError, MachineError, UnreachableError: see `_connection`.
        """
        return await self._connection()

    async def _find_machine(self) -> None:
        """Make sure that the machine of `self.ssh` exists. One that ssh reaches does; a subclass rents it."""

    @property
    def kept_data(self) -> str:
        """Where the data directory is after `down`, in words."""
        return f"{self.server.data_dir} on {self.ssh.host}"

    async def _connect(self) -> ArtClient:
        state = await self.server.ensure(self._say)
        self.tunnel = Tunnel(self.ssh, state.port, local_port=self.local_port)
        client = ArtClient(self.tunnel.url, state.api_key)
        try:
            await self.tunnel.open()
            await client.health()
        except BaseException:
            await client.close()
            await self.tunnel.close()
            raise
        self.local_port = self.tunnel.local_port
        return client

    async def _keep_alive(self) -> None:
        """Start the server again when it does not answer. Clients repeat the requests that were running."""
        num_silent, pause_s = 0, PING_EVERY_S
        while (client := self._client) is not None and self.tunnel is not None:
            await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await client.health()
                num_silent, pause_s = 0, PING_EVERY_S
                continue
            except (TimeoutError, ArtError):
                num_silent += 1
            if num_silent >= NUM_SILENT:
                try:
                    self.tunnel.retarget((await self.server.start()).port)
                    num_silent, pause_s = 0, PING_EVERY_S
                except ArtError as error:
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                    logger.warning("the server on %s is away: %s", self.ssh.host, error)

    async def stop(self) -> None:
        """Close the backend and stop the server. Its data stays; the next use starts it again, and its jobs go on.

        Raises:
            MachineError: the server does not end.
        """
        await self._disconnect()
        await self.server.stop()

    async def down(self, *, delete_data: bool = False) -> bool:
        """Close the backend, stop the server, and delete its environment, key and settings.

        Args:
            delete_data: whether to delete its data directory too: all models, checkpoints and logs of this server.

        Returns:
            whether there is data that stays.

        Raises:
            MachineError: the server does not end, or something cannot be deleted.
        """
        await self._disconnect()
        self._say(f"{self.ssh.host}: deleting {self.server.folder}{'' if delete_data else ', except its data'}")
        return await self.server.remove(delete_data=delete_data)

    async def close(self) -> None:
        """Close all connections and the tunnel. The server goes on, unless the backend was made with `stop_server`."""
        await self._disconnect()
        if self._stops_server:
            await self.server.stop()

    async def _disconnect(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher.get_loop() is asyncio.get_running_loop():
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        try:
            await super().close()
        finally:
            self._client = None
            tunnel, self.tunnel = self.tunnel, None
            if tunnel is not None:
                await tunnel.close()

    def _say(self, line: str) -> None:
        if self._shows_progress:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
