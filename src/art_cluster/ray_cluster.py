"""Engines and trainers on a Ray cluster: `ServerConfig(cluster="ray")`.

    server --(Ray: where, how many, what died)--> WorkerActor on a node --> engine or trainer process
           <--(TCP with TLS: calls, tokens, heartbeats)--
           --(Ray's object store: adapters, samples, checkpoints)-->

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
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from art.config import ModelSettings, ServerConfig, VllmConfig
from art.config.base_models import looks_like_path
from art.errors import ArtError, ConfigError, ProcessError, StorageError
from art.protocol.calls import Call, LoadAdapter, PrepareWeights, SampleFile
from art.protocol.rpc import RpcClient
from art.protocol.training import CheckResult
from art.storage import checkpoints
from art.storage.atomic import new_directory, write_file
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
from art_cluster.worker_actor import Files, WorkerActor, digest_of, read_files, write_files

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
PLACE_TIMEOUT_S = 10.0
"""Longest wait for a cluster to answer, and for room in it."""
MAX_KEPT = 12
"""Files and folders of calls that stay on the nodes: the last checkpoints, which the next calls name again."""
LOOK_EVERY_S = 2.0
MAX_OBJECTS = 3
"""Files and folders that stay in the object store."""
_NOT_FOR_ENGINES = (checkpoints.OPTIMIZER,)


class RayCluster:
    """The Ray cluster of one server."""

    def __init__(self, config: ServerConfig, data_dir: DataDir) -> None:
        self._address = config.cluster if "://" in str(config.cluster) else os.environ.get("RAY_ADDRESS")
        self._worker_address = config.worker_address
        self.key, self.session = secrets.token_hex(32), secrets.token_hex(8)
        self.door = WorkerDoor(self.key)
        self.door_address = ""
        self.sent = SentFiles()
        self.launchers: dict[str, RayLauncher] = {}
        """Those that have been used, by the name of what they start."""
        self._view: dict[str, Any] = {}
        self._looking: asyncio.Task[None] | None = None

    async def open(self) -> None:
        connect(self._address, log_to_driver=False, ignore_reinit_error=True)
        host, _, port = (self._worker_address or f"{_own_address(self._address)}:0").rpartition(":")
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
            return [check_cluster(await asyncio.to_thread(look_at_cluster)), *await self._plan(settings, base_model)]
        finally:
            await self.close()

    async def _plan(self, settings: ModelSettings, base_model: str | None) -> list[CheckResult]:
        threads = settings.engine.num_threads or 1, settings.trainer.num_threads or 1
        actors: list[tuple[WorkerKind, str]] = [
            *(
                ("engine", f"engine {number}" if number > 1 else "engine")
                for number in range(1, settings.engine.replicas + 1)
            ),
            ("trainer", "trainer"),
        ]
        launchers = [RayLauncher(self, kind, name, settings) for kind, name in actors]
        self.launchers |= {name: launcher for (_, name), launcher in zip(actors, launchers, strict=True)}
        looking = asyncio.create_task(look_at_nodes())
        found = await asyncio.gather(
            *(one.reserve(one.bundles(threads[one.kind == "trainer"]), EXAMINE_TIMEOUT_S) for one in launchers),
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
        await asyncio.to_thread(ray.shutdown)


class RayLauncher:
    """Starts one engine, or all ranks of one trainer, in a placement group that it keeps."""

    def __init__(self, cluster: RayCluster, kind: WorkerKind, name: str, settings: ModelSettings) -> None:
        self._cluster, self.kind, self._name, self._settings = cluster, kind, name, settings
        self._group: Any = None
        self._actors: list[Any] = []
        self._watch: asyncio.Task[ArtError] | None = None
        self._machines: list[str] = []
        self._num_starts = 0

    def status(self) -> dict[str, Any]:
        return {"name": self._name, "machines": self._machines, "starts": self._num_starts}

    async def start(self, program: Program, client: RpcClient, timeout_s: float) -> Process:
        self._cluster.launchers[self._name] = self
        await self._end_actors()
        bundles = self.bundles(program.num_threads)
        await self.reserve(bundles)
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

    def bundles(self, num_threads: int) -> list[dict[str, float]]:
        """What each actor needs: its GPUs, or on a cluster without any the CPUs of its threads."""
        engine, trainer = self._settings.engine, self._settings.trainer
        own = engine if self.kind == "engine" else trainer
        num_gpus = engine.num_devices if self.kind == "engine" and isinstance(engine, VllmConfig) else 1
        num_actors = trainer.num_processes if self.kind == "trainer" else 1
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        if own.device == "cuda" or (own.device == "auto" and has_gpus):
            return [{"GPU": float(num_gpus)}] * num_actors
        return [{"CPU": float(num_threads)}] * num_actors

    async def reserve(self, bundles: list[dict[str, float]], timeout_s: float = PLACE_TIMEOUT_S) -> None:
        """Wait for a place for each actor. A request that found none stays, so that an autoscaler can see it.

        Raises:
            ConfigError: there was no room in time.
        """
        if self._group is None:
            self._group = await asyncio.to_thread(ray.util.placement_group, bundles, strategy="PACK", name=self._name)
        ready = await asyncio.to_thread(self._group.wait, timeout_s)
        if ready:
            return
        asked = " + ".join(f"{value:g} {name}" for bundle in bundles for name, value in bundle.items())
        raise ConfigError(
            f"the {self._name} finds no room on the Ray cluster: it needs {asked}, each on one node; there are "
            f"{describe_room()}. Add nodes, end other work there, or ask for less (`num_processes`, `replicas`, "
            "`num_threads`)"
        )

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
        return actor.remote(self._cluster.session)

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
            await _answers([actor.leave.remote() for actor in self._actors], PLACE_TIMEOUT_S, "the nodes")
        await self._end_actors()
        if self._group is not None:
            await asyncio.to_thread(ray.util.remove_placement_group, self._group)


class SentFiles:
    """The last files that went into the object store. All engines ask for those of a publish, which go there once."""

    def __init__(self) -> None:
        self._objects: OrderedDict[str, asyncio.Task[tuple[Any, str]]] = OrderedDict()

    async def put(self, key: str, path: Path, leave_out: tuple[str, ...]) -> tuple[Any, str]:
        """Return the reference of a file's or folder's content, and its hash. `key` is what `_identity` returns."""
        if key not in self._objects:
            self._objects[key] = asyncio.create_task(asyncio.to_thread(_put, path, leave_out), name=f"put {path}")
            for old in list(self._objects)[:-MAX_OBJECTS]:
                del self._objects[old]
        return await asyncio.shield(self._objects[key])

    def forget(self, key: str) -> None:
        """Put this content again when it is next asked for."""
        self._objects.pop(key, None)


class RayFiles:
    """Carries the files of calls to the actors of one engine or trainer, and back from the first of them."""

    def __init__(self, actors: Sequence[Any], root: str, objects: SentFiles) -> None:
        self._actors, self._objects = actors, objects
        self._root = Path(root)
        self._kept: OrderedDict[str, Path] = OrderedDict()
        """What the nodes have, by its hash: the path there."""
        self._made: dict[Path, Path] = {}
        """Paths that a running call writes, here and there."""

    async def sent(self, call: Call[Result]) -> Call[Result]:
        values = dict(call.params)
        for name in call.reads:
            values[name] = await self._sent(values[name], call)
        for name in call.writes:
            if values[name] is not None:
                there = self._root / secrets.token_hex(8) / values[name].name
                self._made[values[name]] = there
                values[name] = there
        return replace(call, **values)  # type: ignore[type-var]  # every call is a dataclass

    async def _sent(self, value: Any, call: Call[Any]) -> Any:
        if isinstance(value, SampleFile):
            return SampleFile(await self._send(value.path))
        if isinstance(value, dict):
            return {key: await self._send(path) for key, path in value.items()}
        if isinstance(value, str):  # a base model: a folder, or an id that the node downloads
            return str(await self._send(Path(value))) if looks_like_path(value) else value
        return await self._send(value, _NOT_FOR_ENGINES if isinstance(call, LoadAdapter | PrepareWeights) else ())

    async def _send(self, path: Path, leave_out: tuple[str, ...] = ()) -> Path:
        key = await asyncio.to_thread(_identity, path, leave_out)
        if key not in self._kept:
            there = self._root / key[:32] / path.name
            try:
                content, digest = await self._objects.put(key, path, leave_out)
                await _finished([actor.store.remote(str(there), content, digest) for actor in self._actors])
            except (StorageError, OSError):
                self._objects.forget(key)  # an object that a node had no room for stays lost to Ray
                raise
            self._kept[key] = there
        self._kept.move_to_end(key)
        await self._forget_old()
        return self._kept[key]

    async def fetched(self, call: Call[Any]) -> None:
        for name in call.writes:
            path = getattr(call, name)
            if path is None or (there := self._made.pop(path, None)) is None:
                continue
            ((files, digest),) = await _finished([self._actors[0].load.remote(str(there))])
            await asyncio.to_thread(_write, path, files, digest)
            if len(self._actors) == 1 and checkpoints.MANIFEST in files:  # the next step starts from it
                self._kept[_identity(path, ())] = there

    async def _forget_old(self) -> None:
        old = [str(self._kept.popitem(last=False)[1]) for _ in range(len(self._kept) - MAX_KEPT)]
        if old:
            await _finished([actor.forget.remote(old) for actor in self._actors])


def _identity(path: Path, leave_out: tuple[str, ...]) -> str:
    """Return the hash of a file or folder. The manifest of a checkpoint has the hashes of its files."""
    manifest = path / checkpoints.MANIFEST
    files: Files = {"": manifest.read_bytes()} if manifest.is_file() else read_files(path)
    return digest_of({**files, **{f"without {name}": b"" for name in leave_out}})


def _write(path: Path, files: Files, digest: str) -> None:
    if (found := digest_of(files)) != digest:
        raise StorageError(f"{path} has the hash {found} after the transfer, expected {digest}")
    if path.exists():  # the folder of a step, which gets one more file
        for name, content in files.items():
            write_file(path / name, content)
        return
    with new_directory(path) as folder:
        write_files(folder, files)


def _put(path: Path, leave_out: tuple[str, ...]) -> tuple[Any, str]:
    files = read_files(path, leave_out)
    try:
        return ray.put(files), digest_of(files)
    except _NO_ROOM as error:
        raise _no_room(f"{sum(map(len, files.values())):,} bytes", error) from error


_NO_ROOM = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
"""What Ray says when neither the object store nor the disk that it spills to has room."""


def _no_room(what: str, error: Exception) -> StorageError:
    return StorageError(
        f"Ray's object store has no room for {what}, and the disk that it spills to neither ({type(error).__name__}): "
        "end what fills them (`ray memory` and `df` on the nodes tell), or start the nodes with a larger "
        "--object-store-memory or more disk. What was recorded and trained is kept: call again when there is room"
    )


async def _finished(works: Sequence[Any]) -> list[Any]:
    """Return the results of actors. Raises `ProcessError` if one of them is gone, `StorageError` if its node has no
    room for what it gets or returns."""
    try:
        return list(await asyncio.gather(*works))
    except ray.exceptions.RayActorError as error:
        raise ProcessError(f"an actor is gone: {str(error).splitlines()[0]}") from error
    except _NO_ROOM as error:
        raise _no_room("a file on the node of an actor", error) from error


async def _answers(works: Sequence[Any], timeout_s: float, whose: str) -> list[Any]:
    try:
        async with asyncio.timeout(timeout_s):
            return await _finished(works)
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
