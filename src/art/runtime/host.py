"""The engine and the trainer of one base model on this machine. `BaseModelHost` wires the parts:

engine     process and sleep of the engine             hosting/engine_handle.py, with its gate
adapters   the policies that the engine holds          hosting/adapter_table.py
trainer    process and calls of the trainer            hosting/trainer_handle.py
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from art.config import EngineConfig, LoraConfig, ModelSettings, ServerConfig, VllmConfig
from art.config.base_models import looks_like_path
from art.engine import EngineInfo
from art.engines.vllm.command import ALLOCATOR_VARIABLES
from art.errors import ProcessError
from art.gateway.format.load import load_renderer
from art.gateway.format.renderer import Renderer
from art.memory.shape import read_shape
from art.protocol.calls import QUANTIZED, Prepare, StartEngine, StartTrainer, StartVllm
from art.protocol.rpc import RpcClient
from art.runtime.hosting.adapter_table import AdapterTable
from art.runtime.hosting.engine_handle import EngineHandle
from art.runtime.hosting.seats import Seats, with_spare, without_spare
from art.runtime.hosting.trainer_handle import TrainerHandle
from art.runtime.hosting.usage import Usage, usage_metrics
from art.runtime.placement.devices import find_devices
from art.runtime.placement.memory import MemoryPlan
from art.runtime.placement.placement import Place, choose_placement, smallest_memory, split_threads
from art.runtime.supervision.launch import WarmParent
from art.runtime.supervision.process import ChildSpec
from art.storage.layout import DataDir


class BaseModelHost:
    """Runs the engine process and the trainer process of one base model. Each starts when it is first needed."""

    def __init__(
        self,
        base_model: str,
        settings: ModelSettings,
        data_dir: DataDir,
        config: ServerConfig,
        name: str | None = None,
        warm_parent: WarmParent | None = None,
        *,
        in_use: Mapping[int, int] | None = None,
        is_new: bool = False,
    ) -> None:
        """
        Args:
            name: names the processes and their logs; by default it is the base model's name without its folder.
            warm_parent: forks the processes that compute on the CPU; by default each is a new interpreter.
            in_use: number of engines and trainers of other base models on each GPU, by its index.
            is_new: somebody is registering a model that needs this host; see `ChildSpec.is_new`.
        """
        self.base_model = base_model
        self.settings = settings
        self.name = name or short_name(base_model)
        self.vllm_python = config.vllm_python
        self.one_policy = isinstance(settings.engine, VllmConfig) and settings.engine.weights == "merged"
        """Whether the engine holds one policy at a time (`weights="merged"`), so that each load replaces the last."""
        self._config = config
        self._data_dir = data_dir
        self._is_new = is_new
        self._warm_parent = warm_parent
        self._renderer: Renderer | None = None
        self._loading = asyncio.Lock()
        self._proving = asyncio.Lock()
        self._proved: set[str] = set()
        """LoRA settings whose layers the engine was proved to serve, without their seed."""
        self._is_needed = asyncio.Event()
        """Set once a model needs the base model, which may not exist before."""
        self._is_needed.set()
        self._devices = find_devices()
        self.placement = choose_placement(settings, self._devices, in_use)
        self._threads = split_threads(settings.engine.num_threads, settings.trainer.num_threads)
        engine_module = "vllm_child" if isinstance(settings.engine, VllmConfig) else "engine_child"
        engine_spec = self._spec("engine", engine_module, self._threads[0], self.placement.engine)
        self._seats = Seats(settings.engine.num_at_once, settings.engine.max_waiting)
        self._engine = EngineHandle(engine_spec, self._start_engine, config, self._seats)
        self.adapters = AdapterTable(self._engine, config, one_policy=self.one_policy, sleeps=self.placement.sleeps)
        trainer_spec = self._spec("trainer", "trainer_child", self._threads[1], self.placement.trainer)
        self.trainer = TrainerHandle(
            trainer_spec, self._start_trainer, config, self._engine_aside, data_dir.samples.absolute()
        )
        self.engine_process, self.trainer_process = self._engine.process, self.trainer.process
        self.on_sampled: Callable[[str, str, float], None] = lambda project, name, device_s: None
        """Called after each answer with its project, its model's name and the seconds of devices that it has used."""
        self._engine.engine.on_sampled = self._note_sampled
        self.engine = self._engine.engine
        self._at_step: Usage | None = None
        """`usage` at the end of the last training step."""

    def _spec(self, kind: str, module: str, num_threads: int, place: Place) -> ChildSpec:
        return ChildSpec(
            name=f"{kind} of {self.name}",
            module=f"art.runtime.children.{module}",
            log_path=self._data_dir.logs / f"{kind}-{self.name}.log",
            num_threads=num_threads,
            config=self._config,
            interruptible=kind == "engine",
            is_new=self._is_new,
            variables=place.environment(self._devices) | (_allocator(place) if kind == "trainer" else {}),
            warm_parent=self._warm_parent if place.kind == "cpu" else None,
            place=f"{place} ({place.reason})",
        )

    def start(self) -> None:
        """Start the engine process and the trainer process in the background."""
        self.engine_process.start()
        self.trainer_process.start()

    def start_ahead(self) -> None:
        """Start both processes before the base model exists. They load it after `note_needed`."""
        self._is_needed.clear()
        self.start()

    def note_needed(self) -> None:
        """A model is based on this base model, so it is there."""
        self._is_needed.set()

    async def _until_needed(self, client: RpcClient) -> None:
        """Let a process import what it needs, and wait until it may load the model."""
        if not self._is_needed.is_set():
            await client.call(Prepare())
            await self._is_needed.wait()

    def retry(self) -> None:
        """Start each process that has failed without a further pause, since the reason may be gone."""
        for process in (self.engine_process, self.trainer_process):
            if process.has_failed:
                process.start()

    def note_registered(self) -> None:
        """From now on a process that cannot start is not the fault of a request: its settings were accepted."""
        self.engine_process.is_new = self.trainer_process.is_new = False

    async def close(self) -> None:
        await asyncio.gather(self.engine_process.close(), self.trainer_process.close())

    async def renderer(self) -> Renderer:
        """
        Raises:
            ProcessError: the folder of the base model is not there now, though the model was registered with it.
            ConfigError: the base model has no chat template that can be used.
        """
        if self._renderer is None:
            self._renderer = await asyncio.to_thread(self._load_renderer)
        return self._renderer

    def _load_renderer(self) -> Renderer:
        if looks_like_path(self.base_model) and not Path(self.base_model).is_dir():
            raise ProcessError(
                f"the folder of base model {self.name!r} is not there now; bring it back, and requests go on"
            )
        return load_renderer(self.base_model, self.settings.render)

    def memory_plan(self) -> MemoryPlan | None:
        """What the memory of engine and trainer is forecast from; `None` if the base model's shape is unknown."""
        shape = read_shape(self.base_model)
        return None if shape is None else MemoryPlan(self.placement, self.settings, self._devices, shape)

    async def engine_info(self) -> EngineInfo:
        return await self._engine.info()

    @property
    def engine_dtype(self) -> str:
        """Number type in which the engine computes log-probs, e.g. "bfloat16", or `QUANTIZED`."""
        engine, info = self.settings.engine, self._engine.known_info
        if isinstance(engine, VllmConfig) and engine.is_quantized:
            return QUANTIZED
        if engine.dtype != "auto":
            return engine.dtype
        return info.dtype if info is not None else "float32" if self.placement.engine.kind == "cpu" else "bfloat16"

    @asynccontextmanager
    async def _engine_aside(self) -> AsyncIterator[None]:
        """During the body the engine sleeps and requests wait, where engine and trainer share a device."""
        if not self.placement.sleeps:
            yield
            return
        what = f"loads into the {self.engine_process.spec.name} to end, so that it can sleep"
        with self.engine.closed.held():
            async with self.adapters.no_loads(what), self._engine.asleep():
                yield

    def usage(self) -> Usage:
        """Return how long engine and trainer have worked and waited so far."""
        return Usage(
            at=time.monotonic(),
            engine_busy_s=self._engine.busy_s,
            engine_asleep_s=self._engine.asleep_s,
            closed_s=self.engine.closed.total_s,
            held_s=self.engine.closed.waited_s,
            trainer_busy_s=self.trainer.busy_s,
        )

    def end_of_step(self) -> dict[str, float]:
        """Return metrics of how engine and trainer spent the time since the last call; nothing at the first."""
        usage = self.usage()
        before, self._at_step = self._at_step, usage
        return {} if before is None else usage_metrics(before, usage)

    @property
    def num_engine_devices(self) -> int:
        engine, num_gpus = self.settings.engine, len(self.placement.engine.indices)
        if num_gpus or not isinstance(engine, VllmConfig):
            return max(1, num_gpus)
        return len(engine.urls) or engine.num_devices  # servers that run already, or GPUs that Ray chooses

    @property
    def num_trainer_devices(self) -> int:
        return max(1, len(self.placement.trainer.indices)) * self.settings.trainer.num_nodes

    def _note_sampled(self, project: str, adapter: str | None, seconds: float) -> None:
        name = self.base_model if adapter is None else adapter.rpartition("@")[0].partition("/")[2]
        self.on_sampled(project, name, seconds * self.num_engine_devices)

    async def prove_layers(self, lora: LoraConfig | None) -> None:
        """Prove once that the engine applies adapters to every kind of layer that `lora` trains.

        Once in the life of this host is enough: a restarted engine has the same release, flags and base model. Nothing
        is proved where the engine gets no adapters: whole weights, merged or of full fine-tuning, are compared by each
        handshake.

        Raises:
            HandshakeError: it does not, or engine and trainer have different base models.
            AdapterError, ProcessError: the engine refused a test adapter, or engine or trainer cannot start.
        """
        if lora is None or self.one_policy:
            return
        kind = lora.model_dump_json(exclude={"seed"})
        async with self._proving:
            if kind in self._proved:
                return
            folder = self._data_dir.test_adapters(self.name).absolute()
            try:
                await self.trainer.write_loud_adapters(folder, lora)
                await self.adapters.prove_layers(folder)
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            self._proved.add(kind)

    async def _start_engine(self, client: RpcClient) -> None:
        await self._until_needed(client)
        async with self._profiling():
            info = await client.call(self._start_call())
        if info.max_running is not None:
            self._seats.resize(without_spare(info.max_running))
        await self.adapters.restore(client)

    def _profiling(self) -> AbstractAsyncContextManager[Any]:
        """Let engine and trainer load one after the other where they share a GPU.

        Both measure its free memory while they load, and vLLM refuses to start if another process changes it.
        """
        shares_gpu = self.placement.shared and self.placement.trainer.kind == "cuda"
        return self._loading if shares_gpu else nullcontext()

    def _start_call(self) -> StartEngine | StartVllm:
        engine = self.settings.engine
        running = None if engine.max_running is None else with_spare(engine.max_running)
        config = engine.model_copy(update={"num_threads": self._threads[0], "max_running": running})
        if isinstance(config, EngineConfig):
            return StartEngine(model=self.base_model, config=config)
        # An engine with adapters has a rank: the settings refuse full fine-tuning for it.
        lora = None if self.one_policy else self.settings.lora
        return StartVllm(
            model=self.base_model,
            config=config,
            lora_rank=None if lora is None else lora.rank,
            python=self.vllm_python,
            sleeps=self.placement.sleeps,
            memory_bytes=smallest_memory(self.placement.engine, self._devices),
            work_dir=self._data_dir.merged(self.name).absolute() if self.one_policy else None,
        )

    async def _start_trainer(self, client: RpcClient) -> None:
        await self._until_needed(client)
        config = self.settings.trainer.model_copy(update={"num_threads": self._threads[1]})
        shares_gpu = self.placement.shared and self.placement.trainer.kind == "cuda"
        async with self._profiling():
            await client.call(
                StartTrainer(model=self.base_model, config=config, shares_gpu=shares_gpu, nodes=self._config.nodes)
            )

    def describe_placement(self) -> dict[str, Any]:
        """Tell which devices engine and trainer have, and why."""
        placement = self.placement
        return {
            part: {"devices": str(place), "reason": place.reason}
            for part, place in (("engine", placement.engine), ("trainer", placement.trainer))
        } | {"sleeps": placement.sleeps}

    def status(self) -> dict[str, Any]:
        info = self._engine.known_info
        return {
            "base_model": self.base_model,
            "engine": self.engine_process.status,
            "trainer": self.trainer_process.status,
            "placement": self.describe_placement(),
            "engine_info": asdict(info) if info else None,
            "adapters": self.adapters.names,
        }


def short_name(base_model: str) -> str:
    """Return the last part of a hub id or path: `org/model` and `/some/where/model` are both `model`."""
    return base_model.rstrip("/").rsplit("/", 1)[-1]


def _allocator(place: Place) -> dict[str, str]:
    """Options of torch's allocator for a trainer: its micro-batches differ in size, which fragments fixed segments."""
    if place.kind != "cuda" or any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        return {}
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
