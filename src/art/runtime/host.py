"""Engine and trainer of one base model on this machine (`BaseModelHost`), and the hosts of all models (`Hosts`).

engine     process and sleep of the engine             hosting/engine_handle.py, with its gate
adapters   the policies that the engine holds          hosting/adapter_table.py
trainer    process and calls of the trainer            hosting/trainer_handle.py

Models with the same base model and the same settings of these processes share a host.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from art.config import EngineConfig, LoraConfig, ModelSettings, ServerConfig, VllmConfig
from art.config.base_models import looks_like_path
from art.engine import EngineInfo, Sender
from art.engines.vllm.command import ALLOCATOR_VARIABLES
from art.errors import ProcessError
from art.gateway.format.load import load_renderer
from art.gateway.format.renderer import Renderer
from art.memory.shape import read_shape
from art.protocol.calls import QUANTIZED, StartEngine, StartTrainer, StartVllm
from art.protocol.rpc import RpcClient
from art.runtime.hosting.adapter_table import AdapterTable
from art.runtime.hosting.engine_handle import EngineHandle
from art.runtime.hosting.seats import Seats, with_spare, without_spare
from art.runtime.hosting.trainer_handle import TrainerHandle
from art.runtime.placement.memory import MemoryPlan
from art.runtime.placement.placement import (
    Devices,
    Place,
    Placement,
    choose_placement,
    find_devices,
    smallest_memory,
    split_threads,
)
from art.runtime.registry import RegisteredModel
from art.runtime.supervision.launch import WarmParent
from art.runtime.supervision.process import ChildProcess, ChildSpec, MakeProcess
from art.storage.layout import DataDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Seconds since the server started the host. A difference of two says what happened between them."""

    at: float
    """The time itself, on a clock that only goes forward."""
    engine_busy_s: float
    """At least one request was computed."""
    engine_asleep_s: float
    closed_s: float
    """Requests were held: the engine slept, or exchanged its weights."""
    held_s: float
    """Waits of held requests, summed over requests."""
    trainer_busy_s: float


def usage_metrics(before: Usage, after: Usage) -> dict[str, float]:
    """Describe the time between two moments, as a rule from the end of one training step to that of the next."""
    seconds = after.at - before.at
    if seconds <= 0:
        return {}
    return {
        "time/since_last_step_s": seconds,
        "time/engine_idle_share": _idle(after.engine_busy_s - before.engine_busy_s, seconds),
        "time/trainer_idle_share": _idle(after.trainer_busy_s - before.trainer_busy_s, seconds),
        "time/engine_asleep_s": after.engine_asleep_s - before.engine_asleep_s,
        "time/requests_closed_s": after.closed_s - before.closed_s,
        "time/requests_held_s": after.held_s - before.held_s,
    }


def _idle(busy_s: float, seconds: float) -> float:
    return min(1.0, max(0.0, 1 - busy_s / seconds))


Charge = Callable[[Sender, str, float], None]
"""Takes who asked for an answer, the name of the model that gave it, and the seconds of devices that it has used."""


def charge_nobody(sender: Sender, model: str, device_s: float) -> None:
    """For hosts that nobody pays for."""


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
        charge: Charge = charge_nobody,
        make_process: MakeProcess = ChildProcess,
        devices: Devices | None = None,
    ) -> None:
        """
        Args:
            name: names the processes and their logs; by default it is the base model's name without its folder.
            warm_parent: forks the processes that compute on the CPU; by default each is a new interpreter.
            in_use: number of engines and trainers of other base models on each GPU, by its index.
            is_new: somebody is registering a model that needs this host; see `ChildSpec.is_new`.
            charge: called after each answer.
            devices: those of this machine; by default they are looked for.
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
        self._charge = charge
        self._warm_parent = warm_parent
        self._renderer: Renderer | None = None
        self._loading = asyncio.Lock()
        self._proving = asyncio.Lock()
        self._proved: set[str] = set()
        """LoRA settings whose layers the engine was proved to serve, without their seed."""
        self._devices = devices or find_devices()
        self.placement = choose_placement(settings, self._devices, in_use)
        self._threads = split_threads(settings.engine.num_threads, settings.trainer.num_threads)
        engine_module = "vllm_child" if isinstance(settings.engine, VllmConfig) else "engine_child"
        engine_spec = self._spec("engine", engine_module, self._threads[0], self.placement.engine)
        self._seats = Seats(settings.engine.num_at_once, settings.engine.max_waiting)
        self._engine = EngineHandle(
            engine_spec, self._start_engine, config, self._seats, self._charge_request, make_process
        )
        self.adapters = AdapterTable(self._engine, config, one_policy=self.one_policy, sleeps=self.placement.sleeps)
        trainer_spec = self._spec("trainer", "trainer_child", self._threads[1], self.placement.trainer)
        self.trainer = TrainerHandle(
            trainer_spec, self._start_trainer, config, self._engine_aside, data_dir.samples.absolute(), make_process
        )
        self.engine_process, self.trainer_process = self._engine.process, self.trainer.process
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
        return max(1, len(self.placement.trainer.indices))

    def _charge_request(self, sender: Sender, adapter: str | None, seconds: float) -> None:
        name = self.base_model if adapter is None else adapter.rpartition("@")[0].partition("/")[2]
        self._charge(sender, name, seconds * self.num_engine_devices)

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
        config = self.settings.trainer.model_copy(update={"num_threads": self._threads[1]})
        shares_gpu = self.placement.shared and self.placement.trainer.kind == "cuda"
        async with self._profiling():
            await client.call(StartTrainer(model=self.base_model, config=config, shares_gpu=shares_gpu))

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


class Hosts:
    """Creates the host of a base model when a model first needs it, and ends it when no model needs it any more."""

    def __init__(
        self,
        data_dir: DataDir,
        config: ServerConfig,
        charge: Charge = charge_nobody,
        devices: Devices | None = None,
    ) -> None:
        """
        Args:
            charge: called after each answer.
            devices: those of this machine; by default they are looked for.
        """
        self._devices = devices
        self._data_dir = data_dir
        self._config = config
        self.vllm_python = config.vllm_python
        self._charge = charge
        self._warm_parent = WarmParent()
        self._hosts: dict[str, BaseModelHost] = {}
        self._by_model: dict[str, tuple[str, ModelSettings, BaseModelHost]] = {}
        """A cache for requests, which saves comparing settings."""
        self._pinned: dict[str, BaseModelHost] = {}
        """Hosts that run whether or not a model uses them."""

    def of(self, model: RegisteredModel, *, is_new: bool = False) -> BaseModelHost:
        """The host of a model. `is_new` says that the model is being registered, should its host have to be made."""
        base_model, settings, host = self._by_model.get(model.key, (None, None, None))
        if host is not None and settings is model.settings and base_model == model.base_model:
            return host
        host = self._of(host_key(model), model.base_model, model.settings, is_new=is_new)
        self._by_model[model.key] = model.base_model, model.settings, host
        return host

    def existing(self, model: RegisteredModel) -> BaseModelHost | None:
        """The host of a model if it was made already. May be called from any thread."""
        return self._hosts.get(host_key(model))

    def pin(self, base_model: str, settings: ModelSettings) -> None:
        """Start the processes of a base model and keep them running, whether or not a model uses them."""
        key = _key(base_model, settings)
        self._pinned[key] = self._of(key, base_model, settings)
        self._pinned[key].start()

    def pinned(self) -> list[BaseModelHost]:
        return list(self._pinned.values())

    def _of(self, key: str, base_model: str, settings: ModelSettings, *, is_new: bool = False) -> BaseModelHost:
        if key not in self._hosts:
            name = self._free_name(base_model)
            self._hosts[key] = BaseModelHost(
                base_model,
                settings,
                self._data_dir,
                self._config,
                name,
                self._warm_parent,
                in_use=self._in_use(),
                is_new=is_new,
                charge=self._charge,
                devices=self._devices,
            )
        return self._hosts[key]

    def placement_of(self, model: RegisteredModel, devices: Devices) -> Placement:
        """Return the devices that engine and trainer of a model have, or would get now."""
        if (host := self.existing(model)) is not None:
            return host.placement
        return choose_placement(model.settings, devices, self._in_use())

    def _in_use(self) -> Counter[int]:
        """Count the engines and trainers on each GPU."""
        places = [place for host in self._hosts.values() for place in (host.placement.engine, host.placement.trainer)]
        return Counter(index for place in places for index in place.indices)

    def _free_name(self, base_model: str) -> str:
        """Choose a name for a new host's processes and logs that no other host has."""
        name, taken = short_name(base_model), {host.name for host in self._hosts.values()}
        names = [name, *(f"{name}-{number}" for number in range(2, len(taken) + 2))]
        return next(name for name in names if name not in taken)

    async def close_unused(self, models: Iterable[RegisteredModel]) -> None:
        """End the hosts that none of `models` uses. Pinned hosts keep running."""
        await self._close({host_key(model) for model in models} | self._pinned.keys())

    async def _close(self, needed: set[str]) -> None:
        unused = {key: host for key, host in self._hosts.items() if key not in needed}
        for key in unused:
            del self._hosts[key]
        kept = list(self._hosts.values())
        self._by_model = {name: entry for name, entry in self._by_model.items() if entry[2] in kept}
        await asyncio.gather(*(host.close() for host in unused.values()))

    async def close(self) -> None:
        await self._close(set())
        await self._warm_parent.close()

    def all(self) -> list[BaseModelHost]:
        return list(self._hosts.values())

    def processes(self) -> list[ChildProcess]:
        return [process for host in self._hosts.values() for process in (host.engine_process, host.trainer_process)]

    def status(self) -> list[dict[str, Any]]:
        return [host.status() for host in self._hosts.values()]


def host_key(model: RegisteredModel) -> str:
    key, engine = _key(model.base_model, model.settings), model.settings.engine
    if isinstance(engine, VllmConfig) and engine.weights == "merged":
        key += f"|{model.key}"  # the engine holds one policy, so models cannot share it
    return key


def _key(base_model: str, settings: ModelSettings) -> str:
    parts = (settings.engine, settings.trainer, settings.render)
    key = "|".join([base_model, *(part.model_dump_json() for part in parts)])
    if isinstance(settings.engine, VllmConfig) and settings.lora is not None:
        key += f"|{settings.lora.rank}"  # vLLM must know the rank of its adapters when it starts
    return key
