"""Engines and trainers on a Ray cluster: `ServerConfig(cluster="ray")`.

    server --(Ray: where, how many, what died)--> WorkerActor on a node --> engine or trainer process
           <--(TCP with TLS: calls, tokens, heartbeats)--
           --(Ray's object store, or a common folder: adapters, samples, checkpoints)-->

Each engine, and each rank of a trainer, is an actor in a bundle of a placement group. Ray only places them and tells
when one is gone: supervision, repetition and the handshake are the server's, as for processes on its own machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from art.config import ModelSettings, ServerConfig
from art.errors import ArtError, ConfigError, ProcessError
from art.protocol.rpc import RpcClient
from art.protocol.training import CheckResult
from art.runtime.placement import devices_per_engine, with_replicas
from art.storage.layout import DataDir
from art.worker.door import Worker, WorkerDoor, WorkerKind
from art.worker.launch import Launcher, Process, Program
from art_cluster.connect import connect, describe_room
from art_cluster.examination import (
    EXAMINE_TIMEOUT_S,
    Place,
    check_cluster,
    check_places,
    check_room,
    check_software,
    look_at_cluster,
    look_at_nodes,
)
from art_cluster.files import RayFiles, SentFiles, discard, finished, own_folder
from art_cluster.worker_actor import WorkerActor

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0
"""Longest wait for a cluster to answer."""
_WAIT_S = 1.0
"""Longest wait for room in one thread, so that the end of the server need not wait longer."""
LOOK_EVERY_S = 2.0


class RayCluster:
    """The Ray cluster of one server."""

    def __init__(self, config: ServerConfig, data_dir: DataDir) -> None:
        self._address = config.cluster if "://" in str(config.cluster) else os.environ.get("RAY_ADDRESS")
        self.config, self._data_dir = config, data_dir
        self.key = secrets.token_hex(32)
        self.door = WorkerDoor(self.key)
        self.door_address = ""
        self.sent = SentFiles(None)
        self.launchers: dict[str, RayLauncher] = {}
        """Those that have been used, by the name of what they start."""
        self._view: dict[str, Any] = {}
        self._looking: asyncio.Task[None] | None = None

    async def open(self) -> None:
        connect(self._address, log_to_driver=False, ignore_reinit_error=True)
        if self.config.cluster_files is not None:
            folder = await asyncio.to_thread(own_folder, self.config.cluster_files, self._data_dir.root)
            self.sent = SentFiles(folder)
        host, _, port = (self.config.worker_address or f"{_own_address(self._address)}:0").rpartition(":")
        await self.door.open(host, int(port))
        self.door_address = f"{host}:{self.door.port}"
        self._view = await asyncio.to_thread(look_at_cluster)
        self._looking = asyncio.create_task(self._keep_looking(), name="look at the Ray cluster")

    async def _keep_looking(self) -> None:
        """Renew what `status` tells: a head that hangs must not hold up the server."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                self._view = await asyncio.to_thread(look_at_cluster)
            except Exception as error:  # of Ray, while its head does not answer
                logger.warning("the head of the Ray cluster does not answer: %s", str(error).splitlines()[0])

    def launcher(self, kind: WorkerKind, name: str, settings: ModelSettings) -> Launcher:
        return RayLauncher(self, kind, name, settings)

    def replicas_beside_trainer(self, settings: ModelSettings) -> int:
        (need, *_), ranks = bundles_of("engine", settings), bundles_of("trainer", settings)
        ((name, size),) = need.items()
        taken = sum(rank.get(name, 0.0) for rank in ranks)
        return int((self._view["free"].get(name, 0.0) - taken) // size)

    def status(self) -> dict[str, Any]:
        """Return what `_keep_looking` has seen last."""
        actors = [launcher.status() for launcher in self.launchers.values()]
        return {
            "kind": "ray", **self._view, "workers": self.door.status(), "actors": actors, "num_lost": self.door.num_lost
        }  # fmt: skip

    async def examine(self, settings: ModelSettings, base_model: str | None) -> list[CheckResult]:
        """Reserve places for engine and trainer, look at the nodes, and give everything back."""
        connect(self._address, log_to_driver=False, ignore_reinit_error=True)
        try:
            self._view = await asyncio.to_thread(look_at_cluster)
            settings = with_replicas(settings, self.replicas_beside_trainer(settings))
            return [check_cluster(self._view), *await self._plan(settings, base_model)]
        finally:
            await self.close()

    async def _plan(self, settings: ModelSettings, base_model: str | None) -> list[CheckResult]:
        actors: list[tuple[WorkerKind, str]] = [
            *(
                ("engine", f"engine {number}" if number > 1 else "engine")
                for number in range(1, settings.engine.num_replicas + 1)
            ),
            ("trainer", "trainer"),
        ]
        launchers = [RayLauncher(self, kind, name, settings) for kind, name in actors]
        self.launchers |= {name: launcher for (_, name), launcher in zip(actors, launchers, strict=True)}
        looking = asyncio.create_task(look_at_nodes())
        found = await asyncio.gather(
            *(one.reserve(EXAMINE_TIMEOUT_S) for one in launchers),
            return_exceptions=True,
        )
        nodes = await looking
        if problem := next((one for one in found if isinstance(one, BaseException)), None):
            remedy = "the message says what to change"
            refused = CheckResult(name="places", status="failure", found=str(problem), remedy=remedy)
            return [check_software(nodes), refused]
        places = [place for launcher in launchers for place in await launcher.places()]
        checks = [check_software(nodes), check_places(places, nodes)]
        return checks if base_model is None else [*checks, check_room(places, nodes, settings, base_model)]

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.gather(*(launcher.close() for launcher in list(self.launchers.values())))
        await self.door.close()
        if self.sent.folder is not None:
            await asyncio.to_thread(discard, self.sent.folder)
        await asyncio.to_thread(ray.shutdown)


class RayLauncher:
    """Starts one engine, or all ranks of one trainer, in a placement group that it keeps."""

    def __init__(self, cluster: RayCluster, kind: WorkerKind, name: str, settings: ModelSettings) -> None:
        self._cluster, self.kind, self._name, self._settings = cluster, kind, name, settings
        self._folder = secrets.token_hex(8)
        """Name of a folder on each node. Another engine there may still use files that this one deletes in its own."""
        self._group: Any = None
        self._actors: list[Any] = []
        self._watch: asyncio.Task[ArtError] | None = None
        self._machines: list[str] = []
        self._num_starts = 0
        self.problem: str | None = None
        """What it lacks to be placed."""

    def status(self) -> dict[str, Any]:
        return {
            "name": self._name, "machines": self._machines, "starts": self._num_starts, "problem": self.problem
        }  # fmt: skip

    async def start(self, program: Program, client: RpcClient, timeout_s: float) -> Process:
        self._cluster.launchers[self._name] = self
        await self._end_actors()
        await self.reserve(self._cluster.config.room_timeout_s)
        bundles = bundles_of(self.kind, self._settings)
        self._actors = [self._make_actor(rank, bundle) for rank, bundle in enumerate(bundles)]
        roots = await _answers(
            [actor.root.remote() for actor in self._actors], timeout_s, f"actors of the {self._name}"
        )
        variables, size = [dict(program.variables) for _ in bundles], len(bundles)
        if size > 1:
            (meeting_point,) = await _answers([self._actors[0].meeting_point.remote()], timeout_s, "the first rank")
            address, port = meeting_point
            for rank, own in enumerate(variables):
                own |= {
                    "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": address, "MASTER_PORT": str(port),
                }  # fmt: skip
        ticket, door, config = secrets.token_hex(8), self._cluster.door, self._settings.trainer.model_dump_json()
        work = self._actors[0].work.remote(
            self.kind, self._cluster.door_address, self._cluster.key, ticket, variables[0] if size > 1 else {}
        )
        ranks = [
            actor.run_rank.remote(config, program.num_threads, own)
            for actor, own in zip(self._actors[1:], variables[1:], strict=True)
        ]
        self._watch = asyncio.create_task(self._watch_actors([work, *ranks], client), name=f"watch {self._name}")
        worker = await self._taken(self._watch, door.take(self.kind, ticket, timeout_s))
        client.files = RayFiles(self._actors, roots[0], self._cluster.sent)
        self._num_starts += 1
        process = door.start(worker, replace(program, variables=variables[0]), client)
        self._machines = await _answers([actor.machine.remote() for actor in self._actors], timeout_s, "the nodes")
        return process

    async def reserve(self, timeout_s: float) -> None:
        """Wait for a place for each actor. A request that found none stays, so that an autoscaler can see it.

        Raises:
            ConfigError: there was no room in time.
        """
        bundles = bundles_of(self.kind, self._settings)
        if self._group is None:
            self._group = await asyncio.to_thread(ray.util.placement_group, bundles, strategy="PACK", name=self._name)
        asked = " + ".join(f"{value:g} {name}" for bundle in bundles for name, value in bundle.items())
        begin = time.monotonic()
        while not await asyncio.to_thread(self._group.wait, _WAIT_S):
            waited_s = time.monotonic() - begin
            self.problem = self.problem or (
                f"the {self._name} finds no room on the Ray cluster: it needs {asked}, each on one node; there are "
                f"{await asyncio.to_thread(describe_room)}"
            )
            if waited_s >= timeout_s:
                raise ConfigError(
                    f"{self.problem}. Add nodes, end other work there, or ask for less (`num_processes`, `replicas`, "
                    "`num_threads`). Where an autoscaler adds nodes, give it time: `room_timeout_s`"
                )
        self.problem = None

    async def places(self) -> list[Place]:
        """Return where the actors are to run, after `reserve`."""
        table = await asyncio.to_thread(ray.util.placement_group_table, self._group)
        nodes = [node for _, node in sorted(table["bundles_to_node_id"].items())]
        bundles = [bundle for _, bundle in sorted(table["bundles"].items())]
        names = [f"rank {rank} of the {self._name}" if len(nodes) > 1 else self._name for rank in range(len(nodes))]
        return [Place(self.kind, *one) for one in zip(names, nodes, bundles, strict=True)]

    def _make_actor(self, rank: int, bundle: dict[str, float]) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        actor = ray.remote(WorkerActor).options(scheduling_strategy=strategy, **options)
        return actor.remote(self._folder)

    async def _taken(self, watch: asyncio.Task[ArtError], take: Coroutine[Any, Any, Worker]) -> Worker:
        """Return the worker that comes to the door. Raises at once what its actor ended with, if it ends before."""
        taking = asyncio.create_task(take, name=f"take the {self._name}")
        try:
            await asyncio.wait([taking, watch], return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                raise await watch
        finally:
            taking.cancel()
        return taking.result()

    async def _watch_actors(self, works: Sequence[Any], client: RpcClient) -> ArtError:
        """End the connection when Ray says that an actor is gone, or a rank has ended. Returns why."""

        async def end_of(work: Any) -> ArtError:
            try:
                return ProcessError(f"rank of the {self._name}: {await work}")
            except ConfigError as error:  # the door refused it
                return ConfigError(f"the {self._name} cannot run on its node: {getattr(error, 'cause', error)}")
            except Exception as error:  # of Ray: the actor died, or what it ran failed
                return ProcessError(f"{type(error).__name__}: {error}".splitlines()[0])

        ends = [asyncio.create_task(end_of(work)) for work in works]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            reason = done.pop().result()
            logger.warning("an actor of the %s has ended: %s", self._name, reason)
            client.abort()
            return reason
        finally:
            for end in ends:
                end.cancel()

    async def _end_actors(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for actor in self._actors:
            await asyncio.to_thread(ray.kill, actor)
        self._actors, self._machines = [], []

    async def close(self) -> None:
        """End the actors, with their files, and give their places back."""
        self._cluster.launchers.pop(self._name, None)
        with contextlib.suppress(ProcessError):  # a node that is gone has nothing left to delete
            await _answers([actor.leave.remote() for actor in self._actors], ANSWER_TIMEOUT_S, "the nodes")
        await self._end_actors()
        if self._group is not None:
            await asyncio.to_thread(ray.util.remove_placement_group, self._group)


def bundles_of(kind: WorkerKind, settings: ModelSettings) -> list[dict[str, float]]:
    """What each actor needs: its GPUs, or on a cluster without any the CPUs of its threads."""
    own = settings.engine if kind == "engine" else settings.trainer
    num_actors = settings.trainer.num_processes if kind == "trainer" else 1
    if own.device == "cuda" or (own.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0):
        num_gpus = devices_per_engine(settings.engine) if kind == "engine" else 1
        return [{"GPU": float(num_gpus)}] * num_actors
    return [{"CPU": float(own.num_threads or 1)}] * num_actors


async def _answers(works: Sequence[Any], timeout_s: float, whose: str) -> list[Any]:
    try:
        async with asyncio.timeout(timeout_s):
            return await finished(works)
    except TimeoutError:
        raise ProcessError(f"no answer from {whose} within {timeout_s:.0f} s") from None


def _own_address(address: str | None) -> str:
    """Return the address of this machine by which the cluster's nodes reach it."""
    if address is None or not address.startswith("ray://"):
        return str(ray.util.get_node_ip_address())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:  # nothing is sent: the system chooses a way
        url = urlsplit(address)
        sock.connect((str(url.hostname), url.port or 10001))
        return str(sock.getsockname()[0])
