"""`SkyNodes`: the machines of a cluster besides its first one. SkyPilot calls them CLUSTER-worker1 and so on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from art.backends.skypilot.sky_config import SkyConfig
from art.backends.skypilot.sky_server import SkyServer
from art.backends.ssh.ssh import Ssh
from art.backends.ssh.ssh_nodes import Nodes, SshNode, at_once
from art.errors import MachineError, UnreachableError

_QUESTION_TIMEOUT_S = 30.0


class SkyNodes(Nodes):
    """The machines of a cluster besides its first one, on which the server runs."""

    def __init__(self, head: SkyServer, config: SkyConfig) -> None:
        names = [f"{head.ssh.host}-worker{number}" for number in range(1, config.num_nodes)]
        super().__init__(head, [SshNode(Ssh(name, config=config.ssh_config)) for name in names])
        self._servers = [
            head,
            *(SkyServer(node.ssh, name=head.name, install=head.install_settings) for node in self.named),
        ]

    async def forget_jobs(self) -> None:
        """Remove what an earlier job of the task file has left on these machines, as far as they are there."""
        for server in self._servers[1:]:
            with contextlib.suppress(MachineError):
                await server.forget_job()

    async def until_set_up(self, timeout_s: float) -> None:
        """Wait until the set-up of the task file has ended on all machines.

        Raises:
            MachineError: it has not within `timeout_s` seconds on one of them.
        """
        await at_once(server.until_set_up(timeout_s) for server in self._servers)

    async def prepare(self, environment: Mapping[str, str]) -> None:
        """Leave the variables of the server on the machines, and learn their addresses in the cluster's network."""
        if not self.named:
            return
        await at_once(server.set_secrets(environment, None) for server in self._servers[1:])
        self.address, *addresses = await at_once(server.node_address() for server in self._servers)
        self.named = tuple(SshNode(node.ssh, address) for node, address in zip(self.named, addresses, strict=True))

    async def lost(self) -> list[str]:
        """Return the names of the machines that cannot be reached now."""
        names = []
        for server in self._servers[1:]:
            try:
                await server.ssh.run("true", timeout_s=_QUESTION_TIMEOUT_S)
            except UnreachableError:
                names.append(server.ssh.name)
        return names
