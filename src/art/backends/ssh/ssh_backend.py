"""`SshBackend`: an ART server on any machine that ssh reaches, used from here.

machine there?  -> art-server there?  -> tunnel -> health        first use: what is missing is installed and started
watch: the server does not answer -> ask the machine -> start it again; the tunnel watches itself
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from art.backend import Backend
from art.backends.ssh.install import Install
from art.backends.ssh.remote_server import RemoteServer, ServerState
from art.backends.ssh.ssh import Ssh
from art.backends.ssh.ssh_nodes import Nodes, SshNode
from art.backends.ssh.tunnel import Tunnel
from art.client import ArtClient
from art.config import ServerConfig
from art.errors import ArtError, ConfigError, MachineError, UnreachableError

logger = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 180.0
"""Seconds from the start of the server to its first answer."""
PING_EVERY_S, PING_TIMEOUT_S = 2.0, 4.0
NUM_SILENT = 2
"""Number of pings in a row without an answer after which the machine is asked what has become of the server."""
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
        nodes: Sequence[str | SshNode] = (),
        address: str | None = None,
        name: str = "default",
        install: Install | None = None,
        server_config: ServerConfig | None = None,
        stop_server: bool = False,
        show_progress: bool = True,
    ) -> None:
        """
        Args:
            host: `user@machine`, an alias of `~/.ssh/config`, or an `Ssh` with a port or a key file of its own.
            nodes: further machines that train together with this one, each as `user@machine`, or as
                `user@machine=ADDRESS` if the first machine reaches it at another address than this one does. A model
                uses them with `TrainerConfig(num_nodes=...)`. ART is installed on them too.
            address: name or IPv4 address of the first machine in the network of the nodes; by default the one that it
                has on its way to the first node.
            name: name of the server among those of the account, each with its own environment and data directory.
            install: what is installed, and where; by default what this process runs, with the extra `local`.
            server_config: settings of the server. A server that already runs must have been started with the same.
            stop_server: whether `close` stops the server too.
            show_progress: whether to write lines about the installation and the start to standard error.

        Raises:
            ConfigError: the host, a node, the name or a setting is malformed; or nodes are given twice.
        """
        super().__init__()
        self.ssh = host if isinstance(host, Ssh) else Ssh(host)
        self.server = RemoteServer(self.ssh, name=name, install=install, config=server_config)
        """The server on the other machine, to look at its state and log."""
        if nodes and server_config is not None and server_config.nodes is not None:
            raise ConfigError(
                "`nodes` and `ServerConfig(nodes=...)` both name machines: leave out the second, which `nodes` makes",
                param="nodes",
            )
        if address is not None and not nodes:
            raise ConfigError("`address` is for the machines in `nodes`; name those too", param="address")
        named = [node if isinstance(node, SshNode) else SshNode.parse(node, like=self.ssh) for node in nodes]
        self.nodes = self.server.nodes = Nodes(self.server, named, address)
        """Further machines of the server."""
        self.tunnel: Tunnel | None = None
        """The tunnel; `None` before the first use and after `close`."""
        self._stops_server = stop_server
        self._shows_progress = show_progress
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._watcher: asyncio.Task[None] | None = None

    async def _connection(self) -> ArtClient:
        """The client of the server, which is installed, started and connected to if need be.

        Raises:
            ConfigError, MachineError, UnreachableError: see `open`.
        """
        loop = asyncio.get_running_loop()
        async with self._locks.setdefault(loop, asyncio.Lock()):
            if self._client is None:
                await self.find_machine()
                started = time.monotonic()
                state = await self.server.ensure(self._say)
                self._client = await self._connect(state)
                self._say(
                    f"{self.ssh.name}: ready at {self._client.base_url} after {time.monotonic() - started:.1f} s "
                    f"(data in {self.server.data_dir})"
                )
            if self._watcher is None or self._watcher.done() or not self._watcher.get_loop().is_running():
                self._watcher = loop.create_task(self._keep_alive(), name="ssh-backend")
            return self._client

    async def open(self) -> ArtClient:
        """Install, start and connect now, rather than with the first use. Returns a client of the server.

        Raises:
            ConfigError: there is no ssh program, or the server runs with other settings.
            MachineError, UnreachableError: the machine does not let us in, or ART cannot be installed or started there.
        """
        return await self._connection()

    async def find_machine(self) -> None:
        """Make sure that the machine of `self.ssh` exists. A machine that ssh reaches does; subclasses make it.

        It is called before the first connection, and again while the machine cannot be reached.
        """

    @property
    def kept_data(self) -> str:
        """Where the data directory is after `down`, in words."""
        return f"{self.server.data_dir} on {self.ssh.name}"

    async def describe(self) -> tuple[bool, str]:
        """Return whether the machine is there to be asked, and what is known about it besides its server."""
        return True, ""

    async def describe_nodes(self) -> list[tuple[str, str, str]]:
        """Return name, state in words and version of ART of each further machine."""
        return await self.nodes.describe()

    async def _connect(self, state: ServerState) -> ArtClient:
        tunnel = Tunnel(self.ssh, state.port, local_port=self.local_port)
        await tunnel.open()
        client = ArtClient(tunnel.url, state.api_key)
        try:
            await self._until_answered(client)
        except BaseException:
            await client.close()
            await tunnel.close()
            raise
        self.tunnel, self.local_port = tunnel, tunnel.local_port
        return client

    async def _until_answered(self, client: ArtClient) -> None:
        deadline = time.monotonic() + ANSWER_DEADLINE_S
        while not await _answers(client):
            state = await self.server.status()
            if state is None or state.failure:
                raise await self.server.start_failure(state)
            if time.monotonic() > deadline:
                log = await self.server.log_tail()
                what = f"art-server on {self.ssh.name} gave no answer within {ANSWER_DEADLINE_S:.0f} s of its start"
                raise UnreachableError(f"{what}; its log ends with:\n{log}")

    async def _keep_alive(self) -> None:
        """Start the server again when it does not answer. Clients repeat the requests that were running."""
        num_silent, pause_s = 0, PING_EVERY_S
        while (client := self._client) is not None:
            await asyncio.sleep(pause_s)
            if await _answers(client):
                num_silent, pause_s = 0, PING_EVERY_S
                continue
            num_silent += 1
            if num_silent < NUM_SILENT or self.tunnel is None:
                continue
            try:
                if not self.tunnel.is_open:
                    await self.find_machine()
                state = await self.server.revive()
                if state.port != self.tunnel.remote_port:
                    self.tunnel.retarget(state.port)
                num_silent, pause_s = 0, PING_EVERY_S
            except ArtError as error:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                logger.warning("the server on %s is away: %s", self.ssh.name, error)

    async def stop(self) -> None:
        """Close the backend and stop the server. Its data stays; the next use starts it again, and its jobs go on.

        Raises:
            MachineError: the server does not end, or a further machine of it cannot be reached.
        """
        await self._disconnect()
        await self._stop_server()

    async def _stop_server(self) -> None:
        await self.server.stop()
        await self.nodes.end()

    async def down(self, *, delete_data: bool = False) -> bool:
        """Close the backend, stop the server, and delete its environment, keys and settings on all its machines.

        Args:
            delete_data: whether to delete its data directory too: all models, checkpoints and logs of this server.

        Returns:
            whether there is data that stays.

        Raises:
            MachineError: the server does not end, or something cannot be deleted.
        """
        await self._disconnect()
        self._say(f"{self.ssh.name}: stopping the server in {self.server.folder}")
        await self.server.stop()
        self._say(f"{self.ssh.name}: deleting {self.server.folder}{'' if delete_data else ', except its data'}")
        problems = await self.nodes.remove()
        stays = await self.server.remove(delete_data=delete_data)
        if problems:
            raise MachineError(
                f"{self.ssh.name} is clean, but a further machine of it is not; `down` can be repeated. "
                + "\n".join(problems)
            )
        return stays

    async def close(self) -> None:
        """Close all connections and the tunnel. The server goes on, unless the backend was made with `stop_server`."""
        await self._disconnect()
        if self._stops_server:
            await self._stop_server()

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


async def _answers(client: ArtClient) -> bool:
    try:
        async with asyncio.timeout(PING_TIMEOUT_S):
            await client.health()
    except (TimeoutError, ArtError):
        return False
    return True
