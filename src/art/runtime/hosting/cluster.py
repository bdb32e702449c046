"""Machines beyond the server's that run its engines and trainers.

    ServerConfig(cluster="workers")    people start `art worker` on them; they see the data directory at the same path
    ServerConfig(cluster="ray")        a Ray cluster (the package `art_cluster`), also by its address `ray://HOST:10001`

Another package can offer a cluster of its own as an entry point in the group `art.clusters`.
"""

from __future__ import annotations

from typing import Any, Protocol

from art.config import ModelSettings, ServerConfig
from art.errors import ConfigError
from art.plugins import find_plugins, load_plugin
from art.protocol.training import CheckResult
from art.runtime.placement import ELSEWHERE, AssignedDevices, Placement
from art.storage.layout import DataDir
from art.worker.door import DoorLauncher, WorkerDoor, WorkerKind, worker_key
from art.worker.launch import Launcher

WORKERS = "workers"
WORKER_PORT = 5001
"""Port of the door, where `worker_address` names none."""


class Cluster(Protocol):
    """Runs engines and trainers on other machines."""

    async def open(self) -> None:
        """Connect to it.

        Raises:
            ConfigError: there is none, or it has other versions.
        """

    def launcher(self, kind: WorkerKind, name: str, settings: ModelSettings) -> Launcher:
        """Return what starts one engine or trainer there. `name` names it, as in "engine 2 of agent"."""

    def replicas_beside_trainer(self, settings: ModelSettings) -> int:
        """Return how many engines of a new model find room now, beside its trainer."""

    def status(self) -> dict[str, Any]:
        """Return its machines and workers, for `art status`, the page and the metrics, without waiting for them. The
        fields are those of `ClusterPart`."""

    async def examine(self, settings: ModelSettings, base_model: str | None) -> list[CheckResult]:
        """Check for `art doctor --cluster` that engine and trainer find room, in place of `open`. Nothing is loaded."""

    async def close(self) -> None: ...


def make_cluster(config: ServerConfig, data_dir: DataDir) -> Cluster | None:
    """Return the cluster that a server's settings name; `None` if everything runs on the server's machine.

    Raises:
        ConfigError: no installed package has such a cluster.
    """
    if config.cluster is None:
        return None
    kind = config.cluster.partition("://")[0]
    if kind == WORKERS:
        return WorkersCluster(config, data_dir)
    if kind not in find_plugins("art.clusters"):
        kinds = ", ".join(map(repr, (WORKERS, *find_plugins("art.clusters"))))
        raise ConfigError(f"there is no cluster {config.cluster!r}; there are {kinds}", param="cluster")
    try:
        cluster: Cluster = load_plugin("art.clusters", kind)(config, data_dir)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cluster {config.cluster!r} needs the package {error.name!r}: pip install "
            "'agent-reinforcement-trainer[cluster]'",
            param="cluster",
        ) from error
    return cluster


def place_on(cluster_name: str) -> Placement:
    """Return the placement of a model whose engine and trainer run on a cluster."""
    devices = AssignedDevices(ELSEWHERE, reason=f"the server's `cluster` is {cluster_name!r}")
    return Placement(engine=devices, trainer=devices)


class WorkersCluster:
    """Workers that people have started by `art worker`."""

    def __init__(self, config: ServerConfig, data_dir: DataDir) -> None:
        host, _, port = (config.worker_address or f"{config.host}:{WORKER_PORT}").rpartition(":")
        if not host or not port.isdigit():
            given = config.worker_address
            raise ConfigError(f"`worker_address` is HOST:PORT, like 0.0.0.0:{WORKER_PORT}; got {given!r}")
        self._address = host, int(port)
        self._folder = data_dir.samples.absolute()
        self._door = WorkerDoor(worker_key())

    async def open(self) -> None:
        await self._door.open(*self._address)

    def launcher(self, kind: WorkerKind, name: str, settings: ModelSettings) -> Launcher:
        return DoorLauncher(self._door, kind, self._folder)

    def replicas_beside_trainer(self, settings: ModelSettings) -> int:
        return sum((worker["kind"], worker["state"]) == ("engine", "waiting") for worker in self._door.status())

    def status(self) -> dict[str, Any]:
        return {"kind": WORKERS, "workers": self._door.status(), "num_lost": self._door.num_lost}

    async def examine(self, settings: ModelSettings, base_model: str | None) -> list[CheckResult]:
        found = "only a running server knows its workers, because they dial in"
        return [CheckResult(name="cluster", status="warning", found=found, remedy="ask the server: `art status`")]

    async def close(self) -> None:
        await self._door.close()
