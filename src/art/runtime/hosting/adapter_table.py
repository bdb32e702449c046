"""Which policies an engine holds: load them, make room, and exchange the only policy of an engine without adapters."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

from art.config import ServerConfig
from art.config.server import CALL_ATTEMPTS, FAILED_STARTS, JOB_TIMEOUT_S
from art.errors import ArtError, CorruptCheckpointError, ProcessError
from art.protocol.calls import UnloadAdapter
from art.protocol.rpc import RpcClient, retry_on_process_death
from art.runtime.hosting.handles import GatedEngine
from art.runtime.hosting.process_engine import ProcessEngine
from art.runtime.publish import prove_layers, publish
from art.storage import checkpoints
from art.worker.waits import acquired

logger = logging.getLogger(__name__)

MAX_LOADED_ADAPTERS = 8
"""Adapters kept in the engine. The least recently used is unloaded first, and loaded again when it is needed."""
MAX_LOADED_FULL = 2
"""Full checkpoints kept in the engine, each as large as a model: the newest, and one whose requests are ending."""


class _Weights(NamedTuple):
    """The weights of an adapter. A step that failed and was trained again has other weights under the same path."""

    checkpoint: Path
    identity: str
    is_full: bool


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
        self._process, self._engine = engine.process, engine
        self._load_timeout_s = config.child_start_timeout_s * FAILED_STARTS
        if sleeps or one_policy:  # loads wait until the engine is awake, and exchanges until no request runs
            self._load_timeout_s += JOB_TIMEOUT_S
        self._loaded: OrderedDict[str, _Weights] = OrderedDict()
        self._lock = asyncio.Lock()
        self._unloading: set[asyncio.Task[None]] = set()

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
                self._process.connect,
                lambda client: prove_layers(_engine_on(client), folder),
                "proving that adapters are applied",
                CALL_ATTEMPTS,
            )

    async def forget(self, adapter_id: str) -> None:
        """Unload an adapter. New requests cannot use it; the call returns when the last running one has ended."""
        if self._loaded.pop(adapter_id, None) is not None:
            await self._unload(adapter_id)

    async def restore(self, client: RpcClient) -> None:
        """Load and prove all adapters again in a new engine process, since running requests name them. Raises
        `ProcessError` if the new process died too."""
        for adapter_id, weights in list(self._loaded.items()):
            try:
                if await asyncio.to_thread(checkpoints.identify, weights.checkpoint) != weights.identity:
                    raise CorruptCheckpointError(f"{weights.checkpoint} is not the checkpoint that was loaded before")
                await publish(_engine_on(client), adapter_id, weights.checkpoint)
            except ProcessError:
                raise
            except ArtError:
                # It was deleted or damaged meanwhile. The next request for it gets the error, the others go on.
                logger.exception("%s could not be loaded again", adapter_id)
                self._loaded.pop(adapter_id, None)

    def no_loads(self, what: str) -> AbstractAsyncContextManager[None]:
        """Let nothing be loaded during the body; `what` says what the caller waits for."""
        return acquired(self._lock, what, self._load_timeout_s)

    def _turn(self, adapter_id: str) -> AbstractAsyncContextManager[None]:
        return self.no_loads(f"its turn to load {adapter_id} into the {self._process.spec.name}")

    async def _exchange(self, adapter_id: str, weights: _Weights) -> dict[str, float]:
        """Replace the policy. If the new one fails its handshake, the old one is loaded again.

        Running requests end with the policy that they began with. New requests wait.
        """
        await asyncio.to_thread(checkpoints.verify, weights.checkpoint)
        await self._engine.prepare_weights(adapter_id, weights.checkpoint)
        with self._engine.closed.held():
            await self._engine.until_empty()
            before, self._loaded = self._loaded, OrderedDict()
            try:
                return await self._publish(adapter_id, weights)
            except Exception:
                for name, previous in before.items():
                    logger.exception("%s failed: loading %s again", adapter_id, name)
                    await self._publish(name, previous)
                raise

    async def _publish(self, adapter_id: str, weights: _Weights) -> dict[str, float]:
        metrics = await retry_on_process_death(
            self._process.connect,
            lambda client: publish(_engine_on(client), adapter_id, weights.checkpoint),
            f"publishing {adapter_id}",
            CALL_ATTEMPTS,
        )
        self.probe_gap = max(self.probe_gap or 0.0, metrics["publish/probe_gap"])
        self._loaded[adapter_id] = weights
        self._loaded.move_to_end(adapter_id)
        return metrics

    def _make_room(self, limit: int, adapter_id: str, *, is_full: bool) -> None:
        """Unload the least recently used adapters of a kind, until at most `limit` are left with `adapter_id`."""
        others = [name for name, weights in self._loaded.items() if weights.is_full == is_full and name != adapter_id]
        for oldest in others[: max(0, len(others) + 1 - limit)]:
            del self._loaded[oldest]
            # Not awaited: its last request may run for long, and loading must not wait for it.
            task = asyncio.create_task(self._unload(oldest), name=f"unload-{oldest}")
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, adapter_id: str) -> None:
        try:
            await (await self._process.connect()).call(UnloadAdapter(name=adapter_id))
        except ProcessError:
            # The engine died, and its adapters with it. A repeated call could unload one that was loaded again since.
            logger.info("%s went with its engine", adapter_id)


def _engine_on(client: RpcClient) -> ProcessEngine:
    """Return the engine at the other end of `client`. Calls fail when it dies: a publish is repeated as a whole."""

    async def connect() -> RpcClient:
        return client

    return ProcessEngine(connect, attempts=1)


def _read(checkpoint: Path) -> _Weights:
    return _Weights(checkpoint, checkpoints.identify(checkpoint), checkpoints.is_full(checkpoint))
