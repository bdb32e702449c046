"""Which policies an engine holds: load them, make room, and exchange the only policy of an engine without adapters.

A policy is loaded into all replicas of the engine that are up, and each proves it by the handshake before it gets
requests for it (`EngineReplica.proved`). One success is enough. A replica that fails where another one succeeds is
refused alone: it is started again, and proves all policies before it is up. If it fails there too, it serves the others
only, until the next policy is published.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from art.config import ServerConfig
from art.config.server import CALL_ATTEMPTS, FAILED_STARTS, JOB_TIMEOUT_S
from art.errors import ArtError, CorruptCheckpointError, ProcessError
from art.protocol.calls import UnloadAdapter
from art.protocol.rpc import RpcClient, retry_on_process_death
from art.runtime.hosting.gated_engine import EngineReplica, GatedEngine, ProvedWeights, all_of, first_connection
from art.runtime.hosting.process_engine import ProcessEngine
from art.runtime.publish import prove_layers, publish
from art.storage import checkpoints
from art.worker.waits import acquired

logger = logging.getLogger(__name__)

MAX_LOADED_ADAPTERS = 8
"""Adapters kept in the engine. The least recently used is unloaded first, and loaded again when it is needed."""
MAX_LOADED_FULL = 2
"""Full checkpoints kept in the engine, each as large as a model: the newest, and one whose requests are ending."""


class AdapterTable:
    """Keeps account of the adapters and full checkpoints in one engine, and loads and unloads them.

    All of them have passed the handshake, which proves that the engine samples from the trained weights.
    """

    def __init__(self, engine: GatedEngine, config: ServerConfig, *, one_policy: bool, sleeps: bool) -> None:
        """With `one_policy` each load replaces the policy that was loaded before. With `sleeps` the engine sleeps while
        the trainer works."""
        self.one_policy = one_policy
        self.probe_gap: float | None = None
        """Largest `publish/probe_gap` of this engine: the noise between engine and trainer."""
        self._engine = engine
        self._load_timeout_s = config.child_start_timeout_s * FAILED_STARTS
        if sleeps or one_policy:  # loads wait until the engine is awake, and exchanges until no request runs
            self._load_timeout_s += JOB_TIMEOUT_S
        self._loaded: OrderedDict[str, ProvedWeights] = OrderedDict()
        self._lock = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        return list(self._loaded)

    def is_loaded(self, adapter_id: str) -> bool:
        """Tell whether requests may name the adapter now. This counts as a use, so others are unloaded before it."""
        if adapter_id not in self._loaded or (self.one_policy and self._engine.closed.lasts):
            return False
        self._loaded.move_to_end(adapter_id)
        return True

    async def ensure_loaded(self, adapter_id: str, checkpoint: Path) -> str:
        """Load `adapter_id` for requests, and return the name of the adapter that they get. Raises what `publish` does.

        An engine with `one_policy` that already holds a policy keeps it, and its name is returned: requests must not
        replace each other's policy.
        """
        if not self.one_policy:
            await self.load(adapter_id, checkpoint)
            return adapter_id
        async with self._turn(adapter_id):
            if not self._loaded:
                await self._exchange(adapter_id, await asyncio.to_thread(_read, checkpoint))
            return next(iter(self._loaded))

    async def load(self, adapter_id: str, checkpoint: Path) -> dict[str, float]:
        """Load `checkpoint` as `adapter_id` and prove it, unless the engine already holds these weights.

        Returns the metrics of `publish`, none if nothing was loaded, and raises what it does.
        """
        async with self._turn(adapter_id):
            weights = await asyncio.to_thread(_read, checkpoint)
            if self._loaded.get(adapter_id) == weights:
                self._loaded.move_to_end(adapter_id)
                return {}
            if self.one_policy:
                return await self._exchange(adapter_id, weights)
            if weights.is_full:  # first make room: there may be no memory for one more
                self._make_room(MAX_LOADED_FULL, adapter_id, is_full=True)
            metrics = await self._publish(adapter_id, weights)
            if not weights.is_full:
                self._make_room(MAX_LOADED_ADAPTERS, adapter_id, is_full=False)
            return metrics

    async def prove_layers(self, folder: Path) -> None:
        """Prove by the test adapters in `folder` that the engine applies adapters. Raises what
        `publish.prove_layers` does."""
        async with self._turn("test adapters"):
            await retry_on_process_death(
                self._engine.connect,
                lambda _: all_of(prove_layers(_engine_on(client), folder) for _, client in self._present()),
                "proving that adapters are applied",
                CALL_ATTEMPTS,
            )

    async def forget(self, adapter_id: str) -> None:
        """Unload an adapter. New requests cannot use it; the call returns when the last running one has ended."""
        if adapter_id in self._loaded:
            self._drop(adapter_id)
            await self._unload(adapter_id)

    async def restore(self, replica: EngineReplica, client: RpcClient) -> None:
        """Load and prove all adapters in the new process of a replica, since running requests name them. Raises
        `ProcessError` if the new process died too."""
        replica.proved, replica.refused = {}, {}
        # Others may be published meanwhile. The last look at them and the moment when the replica is up are the same.
        while missing := [item for item in self._loaded.items() if not _is_known(replica, *item)]:
            adapter_id, weights = missing[0]
            try:
                if await asyncio.to_thread(checkpoints.identify, weights.checkpoint) != weights.identity:
                    raise CorruptCheckpointError(f"{weights.checkpoint} is not the checkpoint that was loaded before")
                await self._prove(replica, client, adapter_id, weights)
            except ProcessError:
                raise
            except ArtError as error:
                logger.exception("%s could not be loaded again into the %s", adapter_id, replica.process.spec.name)
                replica.refused[adapter_id] = error.message
                if adapter_id in self._loaded and all(adapter_id in one.refused for one in self._engine.replicas):
                    # It was deleted or damaged meanwhile. The next request for it gets the error, the others go on.
                    self._drop(adapter_id)
            if self._loaded.get(adapter_id) != weights:  # dropped meanwhile; `_unload` waits for this replica
                replica.proved.pop(adapter_id, None)
                replica.refused.pop(adapter_id, None)

    def no_loads(self, what: str) -> AbstractAsyncContextManager[None]:
        """Let nothing be loaded during the body; `what` says what the caller waits for."""
        return acquired(self._lock, what, self._load_timeout_s)

    def _turn(self, adapter_id: str) -> AbstractAsyncContextManager[None]:
        return self.no_loads(f"its turn to load {adapter_id} into the {self._engine.name}")

    async def _exchange(self, adapter_id: str, weights: ProvedWeights) -> dict[str, float]:
        """Replace the policy. If the new one fails its handshake, the old one is loaded again.

        Running requests end with the policy that they began with. New requests wait.
        """
        await asyncio.to_thread(checkpoints.verify, weights.checkpoint)
        replicas = self._engine.up or self._engine.replicas
        await all_of(replica.engine.prepare_weights(adapter_id, weights.checkpoint) for replica in replicas)
        with self._engine.closed.held():
            await self._engine.until_empty()
            before = dict(self._loaded)
            for name in before:
                self._drop(name)
            try:
                return await self._publish(adapter_id, weights)
            except Exception:
                for name, previous in before.items():
                    logger.exception("%s failed: loading %s again", adapter_id, name)
                    await self._publish(name, previous)
                raise

    async def _publish(self, adapter_id: str, weights: ProvedWeights) -> dict[str, float]:
        """Load and prove an adapter. The metrics are the largest of any replica."""
        measured, refused = await retry_on_process_death(
            self._engine.connect,
            lambda _: self._publish_once(adapter_id, weights),
            f"publishing {adapter_id}",
            CALL_ATTEMPTS,
        )
        self._loaded[adapter_id] = weights
        self._loaded.move_to_end(adapter_id)
        for replica, error in refused.items():
            name, why = replica.process.spec.name, error.message.splitlines()[0]
            logger.error("the %s refused %s, which others serve; it starts again: %s", name, adapter_id, error.message)
            replica.refused[adapter_id] = error.message
            self._in_background(replica.process.end(f"it refused {adapter_id} ({why})"), f"restart-{name}")
        metrics = {name: max(one[name] for one in measured) for name in measured[0]}
        self.probe_gap = max(self.probe_gap or 0.0, metrics["publish/probe_gap"])
        return metrics

    async def _publish_once(
        self, adapter_id: str, weights: ProvedWeights
    ) -> tuple[list[dict[str, float]], dict[EngineReplica, ArtError]]:
        """Load and prove an adapter in all replicas that are up, and in those that come up meanwhile. If all that are
        up refuse it, one that starts may still prove it.

        Returns:
            the metrics of those that proved it, at least one, and the errors of those that refused it.

        Raises:
            ArtError: no replica proved it. A refusal is preferred to a death.
        """
        measured: list[dict[str, float]] = []
        failed: dict[RpcClient, tuple[EngineReplica, ArtError]] = {}
        refused: dict[EngineReplica, ArtError] = {}
        while pairs := [
            (replica, client)
            for replica, client in self._present()
            if client not in failed and replica.proved.get(adapter_id) != weights
        ]:
            proofs = (self._prove(*pair, adapter_id, weights) for pair in pairs)
            results = await asyncio.gather(*proofs, return_exceptions=True)
            for (replica, client), result in zip(pairs, results, strict=True):
                if isinstance(result, ArtError):
                    failed[client] = replica, result
                elif isinstance(result, BaseException):
                    raise result
                else:
                    measured.append(result)
            refused = {replica: error for replica, error in failed.values() if not isinstance(error, ProcessError)}
            absent = [replica for replica in self._engine.replicas if replica not in self._engine.up]
            if refused and absent and not measured:  # one that starts may prove it
                with contextlib.suppress(ArtError):
                    await first_connection(absent)
        if not measured:
            raise next(iter([*refused.values(), *(error for _, error in failed.values())]))
        return measured, refused

    async def _prove(
        self, replica: EngineReplica, client: RpcClient, adapter_id: str, weights: ProvedWeights
    ) -> dict[str, float]:
        proved = replica.proved  # the next process has another one
        proved.pop(adapter_id, None)  # it gets no requests for other weights of this name from here on
        metrics = await publish(_engine_on(client), adapter_id, weights.checkpoint)
        proved[adapter_id] = weights
        replica.refused.pop(adapter_id, None)
        return metrics

    def _present(self) -> list[tuple[EngineReplica, RpcClient]]:
        """Return the replicas that are up, with their connections. Raises `ProcessError` if none is."""
        clients = [(replica, replica.process.live_client) for replica in self._engine.replicas]
        if not (present := [(replica, client) for replica, client in clients if client is not None]):
            raise ProcessError(f"the {self._engine.name} died")
        return present

    def _drop(self, adapter_id: str) -> None:
        """Let no further request use an adapter."""
        del self._loaded[adapter_id]
        for replica in self._engine.replicas:
            replica.proved.pop(adapter_id, None)
            replica.refused.pop(adapter_id, None)

    def _make_room(self, limit: int, adapter_id: str, *, is_full: bool) -> None:
        """Unload the least recently used adapters of a kind, until at most `limit` are left with `adapter_id`."""
        others = [name for name, weights in self._loaded.items() if weights.is_full == is_full and name != adapter_id]
        for oldest in others[: max(0, len(others) + 1 - limit)]:
            self._drop(oldest)
            # Not awaited: its last request may run for long, and loading must not wait for it.
            self._in_background(self._unload(oldest), f"unload-{oldest}")

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _unload(self, adapter_id: str) -> None:
        """Unload an adapter that was dropped from all replicas. Waits for running requests, and for replicas that
        start, which may have begun to load it."""

        async def unload(replica: EngineReplica) -> None:
            try:
                client = await replica.process.connect()
                if adapter_id not in replica.proved:  # else it was loaded again meanwhile
                    await client.call(UnloadAdapter(name=adapter_id))
            except ProcessError:
                # It died, and its adapters with it. A repeated call could unload one that was loaded again since.
                logger.info("%s went with the %s", adapter_id, replica.process.spec.name)

        await all_of(unload(replica) for replica in self._engine.replicas)


def _is_known(replica: EngineReplica, adapter_id: str, weights: ProvedWeights) -> bool:
    return replica.proved.get(adapter_id) == weights or adapter_id in replica.refused


def _engine_on(client: RpcClient) -> ProcessEngine:
    """Return the engine at the other end of `client`. Calls fail when it dies: a publish is repeated as a whole."""

    async def connect() -> RpcClient:
        return client

    return ProcessEngine(connect, attempts=1)


def _read(checkpoint: Path) -> ProvedWeights:
    return ProvedWeights(checkpoint, checkpoints.identify(checkpoint), checkpoints.is_full(checkpoint))
