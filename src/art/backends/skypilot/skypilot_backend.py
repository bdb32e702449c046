"""`SkyPilotBackend`: an ART server on a machine that SkyPilot rents, used from here.

cluster up? -> sky launch (task file) -> ssh: Python, ART, data back -> art-server -> tunnel      the first use
every minute: has the watch ended? copy home; money spent?                                         `_look_after`
machine lost: was it idle? how often? -> launch another, fill it from volume, bucket or home       `find_machine`
one of several lost: the same, and the server joins the new one                                    `_replace_nodes`
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from art.backends.skypilot.cluster import Cluster, ClusterState, Spent
from art.backends.skypilot.home import HomeCopy
from art.backends.skypilot.older import read_environment, read_resources, source_of_version
from art.backends.skypilot.records import copy_folder, make_record, task_path
from art.backends.skypilot.relaunches import Relaunches
from art.backends.skypilot.sky_config import SkyConfig
from art.backends.skypilot.sky_nodes import SkyNodes
from art.backends.skypilot.sky_server import SkyServer
from art.backends.skypilot.sky_tool import Sky
from art.backends.skypilot.task_file import copy_path, make_task, write_yaml
from art.backends.ssh.install import Install, make_package
from art.backends.ssh.launched import Launched
from art.backends.ssh.ssh import Ssh
from art.backends.ssh.ssh_backend import SshBackend
from art.backends.ssh.tunnel import free_port
from art.client import ArtClient
from art.config import ServerConfig
from art.errors import ArtError, BudgetError, ConfigError, NotFoundError
from art.storage.atomic import write_file

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0
ASK_COSTS_EVERY_S = 300.0
SET_UP_TIMEOUT_S = 3600.0


class SkyPilotBackend(SshBackend):
    """Trains and serves on a machine that SkyPilot finds, rents and gives back, in any cloud that it knows.

    The first use launches the machine, installs ART there, starts `art-server` on the machine's loopback, and opens an
    ssh tunnel to it. Closing the backend leaves the machine to its jobs; it goes when it has been idle for
    `idle_minutes`. The next backend with the same cluster name finds it, or launches another with the same data.
    """

    def __init__(
        self,
        gpu: str | None = None,
        *,
        cluster: str = "art",
        idle_minutes: int | None = None,
        config: SkyConfig | None = None,
        install: Install | None = None,
        server_config: ServerConfig | None = None,
    ) -> None:
        """
        Args:
            gpu: kind and number of GPUs of each machine, such as `H100:1`; the same as in `config`.
            cluster: name of the machine among SkyPilot's clusters, and of its server and record.
            idle_minutes: minutes without rollouts and jobs after which the machine goes; the same as in `config`.
            config: the machine, its data and its costs.
            install: what is installed; by default what this process runs, with the extra `local`.
            server_config: settings of the server; by default it does not start without a GPU if one is rented.

        Raises:
            ConfigError: a name or a setting is malformed, or settings contradict each other.
        """
        if not re.fullmatch(r"[a-zA-Z]([a-zA-Z0-9_-]{0,30}[a-zA-Z0-9])?", cluster):
            raise ConfigError(
                f"a cluster's name has up to 32 letters, digits, - and _, and begins with a letter; got {cluster!r}",
                param="cluster",
            )
        changes: dict[str, Any] = {"gpu": gpu, "idle_minutes": idle_minutes}
        changes = {name: value for name, value in changes.items() if value is not None}
        self.config = dataclasses.replace(config or SkyConfig(), **changes)
        folder = (install and install.folder) or f"~/.art/servers/{cluster}"
        install = dataclasses.replace(install or Install(), folder=folder, python=f"{folder}/venv/bin/python")
        if server_config is None and self.config.gpu is not None:
            server_config = ServerConfig(gpu=True)
        super().__init__(
            Ssh(cluster, config=self.config.ssh_config), name=cluster, install=install, server_config=server_config
        )
        self.server: SkyServer = SkyServer(self.ssh, name=cluster, install=install, config=server_config)
        if self.config.num_nodes > 1 and server_config is not None and server_config.nodes is not None:
            raise ConfigError("`num_nodes` and `ServerConfig(nodes=...)` both name machines: give one of them")
        self.nodes: SkyNodes = SkyNodes(self.server, self.config)
        self.server.nodes = self.nodes
        self.server_config = server_config
        self.cluster = Cluster(cluster, Sky(self.config.sky))
        """The machine as SkyPilot knows it."""
        self.environment: dict[str, str] = {}
        """Variables of the server on the machine, such as HF_TOKEN. Set them before the first use."""
        self._launched = Launched()
        self._home = HomeCopy(self.ssh, folder, copy_folder(self._launched, cluster))
        self._minder: asyncio.Task[None] | None = None
        self._failure: ArtError | None = None
        self._relaunches = Relaunches(cluster, self.config)
        self._pulled_at = self._asked_costs_at = -1e9

    @classmethod
    async def initialize_cluster(
        cls,
        *,
        cluster_name: str = "art",
        gpu: str | None = None,
        resources: Any = None,
        art_version: str | None = None,
        env_path: str | Path | None = None,
        force_restart: bool = False,
    ) -> Self:
        """Make a backend as older code does, and launch its machine now.

        Args:
            gpu: kind and number of GPUs; it wins over that of `resources`.
            resources: fields of SkyPilot's resources by name, or a `sky.Resources`.
            art_version: a version of ART to install, or a folder of its source. By default what this process runs.
            env_path: a file of lines `NAME=value`, which become variables of the server.
            force_restart: stop a server that runs there first, so that it gets new settings and variables.

        Raises:
            ConfigError: neither `gpu` nor `resources` is given, or one of them is impossible.
            MachineError: no machine is free, or ART cannot be installed or started there.
        """
        if gpu is None and resources is None:
            raise ConfigError('initialize_cluster needs `gpu`, such as "H100:1", or `resources`', param="gpu")
        config = read_resources(resources)
        install = None if art_version is None else Install(source=source_of_version(art_version))
        backend = cls(gpu, cluster=cluster_name, config=config, install=install)
        if env_path is not None:
            backend.environment = read_environment(Path(env_path))
        if force_restart:
            state = await backend.cluster.state()
            if state is not None and state.is_up:
                await backend.server.stop()
        await backend.open()
        return backend

    def task(self) -> str:
        """Return the content of the task file for SkyPilot, as YAML."""
        package = make_package(self.server.install_settings)
        requirement = package.target if package.file is None and package.digest else None
        return write_yaml(make_task(self.cluster.name, self.config, folder=self.server.folder, requirement=requirement))

    async def _connection(self) -> ArtClient:
        if self._failure is not None:
            raise self._failure
        is_new = self._client is None
        client = await super()._connection()
        if is_new:
            self._save_record(client.api_key or "")
        if self._minder is None or self._minder.done() or not self._minder.get_loop().is_running():
            self._minder = asyncio.get_running_loop().create_task(self._mind(), name="skypilot-backend")
        return client

    async def find_machine(self) -> None:
        """Find the machine, or launch one. A machine that was lost is replaced, with its data.

        Raises:
            ConfigError: there is no usable `sky`, or the machine is impossible as asked for.
            MachineError: no machine is free; or the lost one was idle, had data that is nowhere else, or was one of too
                many.
        """
        state = await self.cluster.state()
        if state is not None and state.is_up:
            server = await self.server.status()
            if server is not None and server.is_running:
                self._say(f"{self.cluster.name}: found, {state.describe()}")
                await self._ask_costs()
                return
        if self._client is not None:
            self._relaunches.check(state)
        await self._launch(state)

    async def _launch(self, state: ClusterState | None) -> None:
        path = task_path(self._launched, self.cluster.name)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        await asyncio.to_thread(write_file, path, self.task().encode())
        if state is not None and state.is_up:
            await self.server.forget_job()
            await self.nodes.forget_jobs()
        api_key = self._known_key()
        self._save_record(api_key or "")  # before the launch: a machine that costs money is never unknown
        self._say(f"{self.cluster.name}: launching as {path} says (minutes)")
        timeout_s = self.config.launch_timeout_s
        await self.cluster.launch(path, timeout_s=timeout_s, on_line=lambda line: self._say(f"  sky: {line}"))
        await self.nodes.until_set_up(SET_UP_TIMEOUT_S)
        await self.server.set_secrets(self.environment, api_key)
        await self.nodes.prepare(self.environment)
        await self.server.install(self._say)
        await self._bring_data_back()
        self._relaunches.last_active_at = time.monotonic()
        await self._ask_costs()

    async def _bring_data_back(self) -> None:
        if await self.server.has_data():
            return
        if self.config.bucket is not None:
            if await self.server.bring_back(copy_path(self.cluster.name)):
                self._say(f"{self.cluster.name}: its data is back from {self.config.bucket}")
        elif self.config.is_pulled and self._home.target.exists():
            num_files = await self._home.push()
            self._say(f"{self.cluster.name}: its data is back from {self._home.target} ({num_files} files)")

    # ---- while it runs

    async def _mind(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._look_after()
            except ArtError as error:
                logger.warning("looking after %s: %s", self.cluster.name, error)
            if self._client is None:
                return

    async def _look_after(self) -> None:
        """Notice that the machine goes, copy its data home, and compare its costs with the budget."""
        watched = await self.server.watched()
        if watched is not None:
            self._relaunches.last_active_at = time.monotonic() - watched.idle_s
            if watched.ended:
                logger.warning(
                    "%s: %s; the machine goes soon, and the next use gets another", self.cluster.name, watched.ended
                )
                await self._pull_quietly()
                await self._disconnect()
                return
        if lost := await self.nodes.lost():
            await self._replace_nodes(lost)
        if time.monotonic() - self._pulled_at >= 60 * (self.config.pull_minutes or 0.0):
            await self._pull_quietly()
        if time.monotonic() - self._asked_costs_at >= ASK_COSTS_EVERY_S:
            spent = await self._ask_costs()
            budget_usd = self.config.budget_usd
            if budget_usd is not None and spent.usd >= budget_usd:
                await self._end_for_budget(spent.usd, budget_usd)

    async def _replace_nodes(self, lost: list[str]) -> None:
        """Replace machines that are lost while the first one, with the server, goes on. Its jobs go on afterwards."""
        state = await self.cluster.state()
        if state is not None and state.is_up:
            return  # their cloud has them
        self._relaunches.check(state)
        logger.warning("%s: %s cannot be reached; the server stops until there are others", self.cluster.name, lost)
        self.server.is_replaced = True
        try:
            await self._pull_quietly()
            await self.server.stop()
            await self.server.forget_job()
            await self.nodes.forget_jobs()
            await self._launch(state)
        finally:
            self.server.is_replaced = False
        started = await self.server.ensure(self._say)
        if self.tunnel is not None:
            self.tunnel.retarget(started.port)

    async def _end_for_budget(self, usd: float, budget_usd: float) -> None:
        self._failure = BudgetError(
            f"the machines of {self.cluster.name!r} have cost {usd:.2f} of {budget_usd:.2f} USD, so it was taken down. "
            "With a higher budget_usd the same script goes on where it stopped"
        )
        logger.error("%s", self._failure)
        await self._pull_quietly()
        await self._disconnect()
        await (self.cluster.stop() if self.config.on_idle == "stop" else self.cluster.down())

    async def _ask_costs(self) -> Spent:
        """Ask SkyPilot what the cluster has cost, and tell the models and the watch on the machine."""
        spent = await self.cluster.spent(self.first_launched_at())
        self._asked_costs_at = time.monotonic()
        if spent.usd_per_hour:
            self.device_usd_per_hour = spent.usd_per_hour
            if self.config.budget_usd is not None:
                await self.server.set_end((self.config.budget_usd - spent.usd) / spent.usd_per_hour)
        return spent

    # ---- its data, and its end

    async def pull_home(self) -> Path:
        """Copy the server's data directory to this machine: registry, checkpoints, recorded answers.

        Exports, merged models and logs are left out. Files that are here already are not sent again.

        Returns:
            Folder of the copy.

        Raises:
            MachineError: the machine cannot be reached, or does not send them.
        """
        num_files = await self._home.pull()
        self._pulled_at = time.monotonic()
        logger.info("%s: %d files came to %s", self.cluster.name, num_files, self._home.target)
        return self._home.target

    async def _pull_quietly(self) -> None:
        if not self.config.is_pulled:
            return
        self._pulled_at = time.monotonic()  # a failure is tried again as late as a success
        try:
            await self.pull_home()
        except ArtError as error:
            logger.warning("the data of %s could not be copied here: %s", self.cluster.name, error)

    async def _pull_before_end(self, cluster: ClusterState | None) -> None:
        if self.config.is_pulled and cluster is not None and cluster.is_up and await self.server.has_data():
            await self.pull_home()

    async def stop(self) -> None:
        """Copy the data home, stop the server, and stop the machine. Its disk stays, and costs a little.

        Raises:
            ConfigError: it is a spot machine, or its cloud cannot stop machines.
            MachineError: the data could not be copied, or the server does not end. The machine goes on.
        """
        if self.config.spot:
            raise ConfigError("spot machines cannot be stopped; `down` takes this one down")
        state = await self.cluster.state()
        await self._pull_before_end(state)
        if state is not None and state.is_up:
            await super().stop()
        await self._disconnect()
        await self.cluster.stop()

    async def down(self, *, delete_data: bool = False) -> bool:
        """Copy the data home, and delete the machine with its disk. A machine that is gone already is no error.

        Args:
            delete_data: copy nothing, and delete the copy that is here too. A volume or bucket is left alone.

        Returns:
            whether there is data that stays.

        Raises:
            MachineError: the data could not be copied, so the machine goes on; or it could not be deleted.
        """
        if not delete_data:
            await self._pull_before_end(await self.cluster.state())
        await self._disconnect()
        self._say(f"{self.cluster.name}: deleting the machine")
        await self.cluster.down()
        if delete_data:
            await asyncio.to_thread(shutil.rmtree, self._home.target, ignore_errors=True)
        self._launched.forget(self.cluster.name)
        return not delete_data and (not self.config.is_pulled or self._home.target.exists())

    async def close(self) -> None:
        """Copy the data home, and close all connections and the tunnel. The machine goes on with its jobs, until it is
        idle."""
        if self._client is not None:
            await self._pull_quietly()
        await super().close()

    @property
    def kept_data(self) -> str:
        """Where the data directory is after `down`, in words."""
        if self.config.is_pulled:
            return str(self._home.target)
        return self.config.volume or self.config.bucket or "no place: it was on the machine's disk only"

    async def describe(self) -> tuple[bool, str]:
        """Return whether the machine is up, and in words what it is and what it has cost."""
        state, spent = await asyncio.gather(self.cluster.state(), self.cluster.spent(self.first_launched_at()))
        price = f", {spent.usd_per_hour:.2f} USD an hour" if spent.usd_per_hour and state is not None else ""
        words = f"{state.describe() if state else 'no machine'}; {spent.usd:.2f} USD so far{price}"
        return state is not None and state.is_up, words

    async def describe_nodes(self) -> list[tuple[str, str, str]]:
        """Return name, state in words and version of ART of each machine but the first, if the cluster is up."""
        state = await self.cluster.state() if self.config.num_nodes > 1 else None
        return await super().describe_nodes() if state is not None and state.is_up else []

    async def _stop_server(self) -> None:
        await self.server.stop()  # processes on the other machines end with it

    async def _disconnect(self) -> None:
        minder = self._minder
        if minder is not None and minder is not asyncio.current_task():
            self._minder = None
            if minder.get_loop() is asyncio.get_running_loop():
                minder.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await minder
        await super()._disconnect()

    # ---- its record

    def _known_key(self) -> str | None:
        if self._client is not None:
            return self._client.api_key
        with contextlib.suppress(OSError):
            return self._launched.key_path(self.cluster.name).read_text(encoding="utf-8") or None
        return None

    def first_launched_at(self) -> float:
        """When the first machine of the record was launched, in seconds since 1970. Its costs count from then on."""
        with contextlib.suppress(NotFoundError):
            return self._launched.find(self.cluster.name).launched_at
        return time.time()

    def _save_record(self, api_key: str) -> None:
        if self.local_port is None:
            self.local_port = free_port()
        details: Mapping[str, Any] = {"config": self.config, "server_config": self.server_config}
        record = make_record(
            self.cluster.name, self.server.folder, self.local_port, details, launched_at=self.first_launched_at()
        )
        self._launched.save(record, api_key)
