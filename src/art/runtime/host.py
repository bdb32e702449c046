"""One base model on this machine: its engine process, its trainer process, its renderer, and the adapters that are
loaded."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from art.config import LoraConfig, ModelSettings, ServerConfig, VllmConfig
from art.engine import EngineInfo
from art.engines.process import ProcessEngine
from art.errors import ArtError, JobCancelledError, ProcessError, TrainingError
from art.gateway.format.load import load_renderer
from art.gateway.format.renderer import Renderer
from art.protocol.rpc import RpcClient
from art.runtime.gate import Gate, GatedEngine
from art.runtime.placement.devices import find_devices
from art.runtime.placement.placement import Place, choose_placement
from art.runtime.publish.publish import publish
from art.runtime.supervision.process import ChildProcess, ChildSpec, split_threads
from art.runtime.supervision.waits import acquired
from art.storage import checkpoints
from art.storage.layout import DataDir
from art.trainer.contract import TrainingSample

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnProgress = Callable[[int, int], Awaitable[None]]

MAX_LOADED_ADAPTERS = 8
"""Adapters kept in the engine; the least recently used ones go first and come back when asked for."""
MAX_LOADED_FULL = 2
"""The same for full checkpoints, each of which takes the memory of a model: the newest, and one whose requests end."""
STOP_WITHIN_S = 60.0
"""From a cancellation to the end of the trainer's process, if it is still at the same micro-batch."""
ATTEMPTS = 3
"""Times that a call is made whose process dies under it; each call can be repeated without harm."""


class _Loaded(NamedTuple):
    """Which weights an adapter has: a step that failed and was trained again lies under the same path."""

    checkpoint: Path
    identity: str
    is_full: bool


class BaseModelHost:
    """Parts of one base model. Starting is lazy: the engine with the first request, the trainer with the first
    checkpoint."""

    def __init__(
        self, base_model: str, settings: ModelSettings, data_dir: DataDir, config: ServerConfig, name: str | None = None
    ) -> None:
        """
        Args:
            name: of its processes in messages and of their logs; by default the base model's, without its folder.
        """
        self.base_model = base_model
        self.settings = settings
        self.name = name or short_name(base_model)
        engine_threads, trainer_threads = split_threads(settings.engine.num_threads, settings.trainer.num_threads)
        devices = find_devices()
        self.placement = choose_placement(settings, devices)

        def spec(kind: str, num_threads: int, place: Place, module: str) -> ChildSpec:
            return ChildSpec(
                name=f"{kind} of {self.name}",
                module=f"art.runtime.children.{module}",
                log_path=data_dir.logs / f"{kind}-{self.name}.log",
                num_threads=num_threads,
                start_timeout_s=config.child_start_timeout_s,
                heartbeat_timeout_s=config.heartbeat_timeout_s,
                stall_timeout_s=config.stall_timeout_s,
                memory=config.memory,
                interruptible=kind == "engine",
                variables=place.environment(devices),
            )

        self._may_start = asyncio.Event()
        """Whether there is memory for an engine: not while the trainer has that of one that sleeps."""
        self._may_start.set()
        engine_module = "vllm_child" if isinstance(settings.engine, VllmConfig) else "engine_child"
        self.engine_process = ChildProcess(
            spec("engine", engine_threads, self.placement.engine, engine_module), self._start_engine, self._may_start
        )
        self.trainer_process = ChildProcess(
            spec("trainer", trainer_threads, self.placement.trainer, "trainer_child"), self._start_trainer
        )
        self._raw_engine = ProcessEngine(self.engine_process.connect)
        self._gate = Gate(f"the {self.engine_process.spec.name}", config.job_timeout_s)
        self.engine = GatedEngine(self._raw_engine, self._gate)
        self._num_threads = {"engine": engine_threads, "trainer": trainer_threads}
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        self._load_lock = asyncio.Lock()
        self._unloading: set[asyncio.Task[None]] = set()
        self._tolerance = config.handshake_tolerance
        self.vllm_python = config.vllm_python
        self._renderer: Renderer | None = None
        self._engine_info: EngineInfo | None = None
        self._trainer_lock = asyncio.Lock()
        self._load_timeout_s = config.child_start_timeout_s * ATTEMPTS
        self._job_timeout_s = config.job_timeout_s
        self.one_policy = isinstance(settings.engine, VllmConfig) and settings.engine.weights == "merged"
        """Whether each load takes the place of the one before."""
        self._work_dir = data_dir.merged(self.name)
        if self.placement.sleeps or self.one_policy:
            # Nothing is loaded into an engine that sleeps, nor exchanged while requests run.
            self._load_timeout_s += self._job_timeout_s

    def start(self) -> None:
        """Start both processes in the background."""
        self.engine_process.start()
        self.trainer_process.start()

    def retry(self) -> None:
        """Start what was given up on once more: the reason may be gone."""
        for process in (self.engine_process, self.trainer_process):
            if process.given_up:
                process.start()

    async def close(self) -> None:
        await asyncio.gather(self.engine_process.close(), self.trainer_process.close())

    async def renderer(self) -> Renderer:
        if self._renderer is None:
            self._renderer = await asyncio.to_thread(load_renderer, self.base_model, self.settings.render)
        return self._renderer

    async def engine_info(self) -> EngineInfo:
        if self._engine_info is None:
            self._engine_info = await self._raw_engine.info()
        return self._engine_info

    def is_loaded(self, adapter_id: str) -> bool:
        """Whether requests may name it right now; counts as a use."""
        if adapter_id not in self._loaded or (self.one_policy and not self._gate.is_open):
            return False
        self._loaded.move_to_end(adapter_id)
        return True

    async def ensure(self, adapter_id: str, checkpoint: Path) -> str:
        """Have `adapter_id` loaded, and return it. With `one_policy` that is done only if nothing is loaded, else what
        is there is returned: requests must not take it from each other.

        Raises: as `publish`.
        """
        if not self.one_policy:
            await self.load(adapter_id, checkpoint)
            return adapter_id
        async with self._loading(adapter_id):
            if not self._loaded:
                await self._exchange(adapter_id, await asyncio.to_thread(_read, checkpoint))
            return next(iter(self._loaded))

    async def load(self, adapter_id: str, checkpoint: Path) -> dict[str, float]:
        """Publish `checkpoint` as `adapter_id` unless the engine has just that; the metrics of the publish, or none.

        Raises: as `publish`.
        """
        async with self._loading(adapter_id):
            wanted = await asyncio.to_thread(_read, checkpoint)
            if self._loaded.get(adapter_id) == wanted:
                self._loaded.move_to_end(adapter_id)
                return {}
            if self.one_policy:
                return await self._exchange(adapter_id, wanted)
            if wanted.is_full:  # before it is loaded: there may be no memory for a further one
                self._make_room(MAX_LOADED_FULL, adapter_id, is_full=True)
            metrics = await self._publish(adapter_id, wanted)
            if not wanted.is_full:
                self._make_room(MAX_LOADED_ADAPTERS, adapter_id, is_full=False)
            return metrics

    def _loading(self, adapter_id: str) -> AbstractAsyncContextManager[None]:
        turn = f"its turn to load {adapter_id} into the {self.engine_process.spec.name}"
        return acquired(self._load_lock, turn, self._load_timeout_s)

    async def _exchange(self, adapter_id: str, wanted: _Loaded) -> dict[str, float]:
        """Put one policy in the place of another, which comes back if the new one is not what was trained.

        Requests that run end with the policy that they began with; those that come meanwhile wait.
        """
        await asyncio.to_thread(checkpoints.verify, wanted.checkpoint)
        await self._raw_engine.prepare_weights(adapter_id, wanted.checkpoint)
        with self._gate.closed():
            await self.engine.emptied(self._job_timeout_s)
            before, self._loaded = self._loaded, OrderedDict()
            try:
                metrics = await self._publish(adapter_id, wanted)
            except Exception:
                for name, loaded in before.items():
                    logger.exception("%s failed: %s comes back", adapter_id, name)
                    await self._publish(name, loaded)
                raise
            return metrics

    async def _publish(self, adapter_id: str, wanted: _Loaded) -> dict[str, float]:
        metrics = await _insist(
            lambda: publish(self._raw_engine, adapter_id, wanted.checkpoint, self._tolerance),
            f"publishing {adapter_id}",
        )
        self._loaded[adapter_id] = wanted
        self._loaded.move_to_end(adapter_id)
        return metrics

    def _make_room(self, limit: int, adapter_id: str, *, is_full: bool) -> None:
        """Let the least recently used ones of a kind go, until there are at most `limit` with `adapter_id`."""
        others = [name for name, entry in self._loaded.items() if entry.is_full == is_full and name != adapter_id]
        for oldest in others[: max(0, len(others) + 1 - limit)]:
            del self._loaded[oldest]
            # Not awaited: its last request may take long, and loading must not stand still so long.
            task = asyncio.create_task(self._unload(oldest), name=f"unload-{oldest}")
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def forget_adapter(self, adapter_id: str) -> None:
        """Take no more requests for it; returns when its last one has ended."""
        if self._loaded.pop(adapter_id, None) is not None:
            await self._unload(adapter_id)

    async def _unload(self, adapter_id: str) -> None:
        try:
            await (await self.engine_process.connect()).call("unload_adapter", name=adapter_id)
        except ProcessError:
            # The engine died, and its adapters with it. To repeat the call could hit one that was loaded again since.
            logger.info("%s went with its engine", adapter_id)

    async def init_checkpoint(self, path: Path, lora: LoraConfig | None) -> None:
        """Make step 0; `None` is full fine-tuning."""
        await self._train_call("init_checkpoint", path=str(path), lora=None if lora is None else lora.model_dump())

    async def train(
        self, kind: str, *, stop: asyncio.Event | None = None, on_progress: OnProgress | None = None, **params: Any
    ) -> dict[str, Any]:
        """Run one training call to its end, starting over from its checkpoint when the trainer dies.

        Args:
            stop: once it is set, the call ends behind the next micro-batch.
            on_progress: awaited with (micro-batches done, of how many).

        Raises:
            JobCancelledError: stopped. A call that was about to end anyway returns instead.
            ProcessError: the trainer died `ATTEMPTS` times.
        """
        result: dict[str, Any] = await self._train_call(
            kind, stop, on_progress, engine_sleeps=self.placement.sleeps, **params
        )
        return result

    async def trial(self, samples: list[TrainingSample], lora: LoraConfig | None) -> dict[str, float]:
        """What a step takes; see `Trainer.trial`. Not made again when the trainer dies of it."""
        turn = f"its turn for a trial step in the {self.trainer_process.spec.name}"
        async with acquired(self._trainer_lock, turn, self._job_timeout_s), self._engine_aside(self.placement.sleeps):
            client = await self.trainer_process.connect()
            settings = None if lora is None else lora.model_dump()
            result: dict[str, float] = await client.call("trial", samples=samples, lora=settings)
        return result

    async def _train_call(
        self,
        method: str,
        stop: asyncio.Event | None = None,
        on_progress: OnProgress | None = None,
        *,
        engine_sleeps: bool = False,
        **params: Any,
    ) -> Any:
        async def run() -> Any:
            if stop is not None and stop.is_set():
                raise JobCancelledError(f"`{method}` was cancelled")
            client = await self.trainer_process.connect()
            result = None
            stopping = asyncio.create_task(self._stop_call(client, method, stop), name=f"stop-{method}")
            try:
                async with asyncio.timeout(self._job_timeout_s):
                    async for result in client.stream(method, **params):
                        if on_progress is not None and (progress := result.get("progress")) is not None:
                            await on_progress(progress["done"], progress["total"])
            except TimeoutError:
                problem = f"`{method}` took longer than `job_timeout_s` = {self._job_timeout_s:g} s"
                await self.trainer_process.end(problem)
                raise TrainingError(f"{problem}; the {self.trainer_process.spec.name} was ended") from None
            finally:
                stopping.cancel()
            return result

        turn = f"its turn to `{method}` in the {self.trainer_process.spec.name}"
        async with acquired(self._trainer_lock, turn, self._job_timeout_s), self._engine_aside(engine_sleeps):
            return await _insist(run, method)

    @asynccontextmanager
    async def _engine_aside(self, sleeps: bool) -> AsyncIterator[None]:
        """With `sleeps`, the engine sleeps during the body and requests wait; one that dies meanwhile is started again,
        awake, after it."""
        if not sleeps:
            yield
            return
        turn = f"loads into the {self.engine_process.spec.name} to end, so that it can sleep"
        with self._gate.closed():
            async with acquired(self._load_lock, turn, self._load_timeout_s):
                try:
                    await self._raw_engine.sleep()
                    self._may_start.clear()
                    yield
                finally:
                    self._may_start.set()
                    await self._wake_engine()

    async def _wake_engine(self) -> None:
        """If it is there; one that died is awake when it is back."""
        client = self.engine_process.live_client
        if client is None:
            return
        try:
            await client.call("wake")
        except ProcessError as error:
            if not client.closed:  # its memory may be half there
                await self.engine_process.end(f"it did not wake up: {error.message.splitlines()[0]}")

    async def _stop_call(self, client: RpcClient, method: str, stop: asyncio.Event | None) -> None:
        """End a running call once `stop` is set, and its process if it does not end by itself: checkpoints are written
        under a temporary name, so that is safe at any moment."""
        if stop is not None:
            await stop.wait()
            client.ask_to_stop(method)
            await asyncio.sleep(STOP_WITHIN_S)
            await self.trainer_process.end(f"`{method}` was cancelled and had not stopped after {STOP_WITHIN_S:g} s")

    async def _start_engine(self, client: RpcClient) -> None:
        config = self.settings.engine.model_copy(update={"num_threads": self._num_threads["engine"]})
        start: dict[str, Any] = {"model": self.base_model, "config": config.model_dump()}
        if isinstance(config, VllmConfig):
            # The settings allow no engine with adapters for full fine-tuning.
            rank = None if self.one_policy or self.settings.lora is None else self.settings.lora.rank
            start |= {"lora_rank": rank, "python": self.vllm_python, "sleeps": self.placement.sleeps}
            if self.one_policy:
                start["work_dir"] = str(self._work_dir.absolute())
        await client.call("start", **start)

        async def connected() -> RpcClient:
            return client

        # A restarted engine gets back, and proves, what it had: requests that were running name these adapters.
        for adapter_id, loaded in list(self._loaded.items()):
            try:
                await publish(ProcessEngine(connected), adapter_id, loaded.checkpoint, self._tolerance)
            except ProcessError:
                raise
            except ArtError:
                # Deleted or damaged meanwhile: whoever asks for it is told, and the others must not suffer.
                logger.exception("%s could not be loaded again", adapter_id)
                self._loaded.pop(adapter_id, None)

    async def _start_trainer(self, client: RpcClient) -> None:
        config = self.settings.trainer.model_copy(update={"num_threads": self._num_threads["trainer"]})
        shares_gpu = self.placement.shared and self.placement.trainer.kind == "cuda"
        await client.call("start", model=self.base_model, config=config.model_dump(), shares_gpu=shares_gpu)

    def status(self) -> dict[str, Any]:
        return {
            "base_model": self.base_model,
            "engine": self.engine_process.status,
            "trainer": self.trainer_process.status,
            "engine_info": asdict(self._engine_info) if self._engine_info else None,
            "adapters": list(self._loaded),
        }


def short_name(base_model: str) -> str:
    """`org/model` and `/some/where/model` are both `model`."""
    return base_model.rstrip("/").rsplit("/", 1)[-1]


def _read(checkpoint: Path) -> _Loaded:
    return _Loaded(checkpoint, checkpoints.identify(checkpoint), checkpoints.is_full(checkpoint))


async def _insist(call: Callable[[], Awaitable[T]], what: str) -> T:
    """The result of `call`, made again when its process dies."""
    for attempt in range(1, ATTEMPTS):
        try:
            return await call()
        except ProcessError as error:
            first_line = error.message.splitlines()[0]
            logger.warning("%s starts over (attempt %d of %d): %s", what, attempt + 1, ATTEMPTS, first_line)
    return await call()
