"""Engine and trainer of one base model on this machine (`BaseModelHost`), and the hosts of all models (`Hosts`).

engine     processes, sleep and gate of the engine     hosting/gated_engine.py
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
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from art.config import EngineConfig, LoraConfig, ModelSettings, ServerConfig, VllmConfig
from art.config.base_models import looks_like_path
from art.engine import EngineInfo
from art.engines.vllm.command import ALLOCATOR_VARIABLES
from art.errors import ProcessError
from art.gateway.renderer import Renderer, load_renderer
from art.memory import read_shape
from art.protocol.calls import QUANTIZED, StartEngine, StartTrainer, StartVllm
from art.protocol.rpc import RpcClient
from art.runtime.hosting.adapter_table import AdapterTable
from art.runtime.hosting.cluster import Cluster, place_on
from art.runtime.hosting.gated_engine import EngineReplica, GatedEngine
from art.runtime.hosting.trainer_handle import TrainerHandle
from art.runtime.memory import MemoryPlan
from art.runtime.placement import (
    VISIBLE,
    AssignedDevices,
    Devices,
    Placement,
    choose_placement,
    find_devices,
    replicas_beside_trainer,
    smallest_memory,
    split_threads,
    with_replicas,
)
from art.runtime.registry import RegisteredModel, host_key
from art.storage.layout import DataDir
from art.worker.door import WorkerKind
from art.worker.launch import Launcher, LocalLauncher, WarmParent, child_environment
from art.worker.process import ChildProcess, ChildSpec, MakeProcess

SCORING_PLACES = 8
"""Requests that an engine computes beside those that have a seat: the handshake scores without one."""


class BaseModelHost:
    """Runs the engine processes and the trainer process of one base model. They start when they are first needed."""

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
        make_process: MakeProcess = ChildProcess,
        devices: Devices | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        """
        Args:
            name: names the processes and their logs; by default it is the base model's name without its folder.
            warm_parent: forks the processes that compute on the CPU; by default each is a new interpreter.
            in_use: number of engines and trainers of other base models on each GPU, by its index.
            is_new: somebody is registering a model that needs this host; see `ChildSpec.is_new`.
            devices: those of this machine; by default they are looked for.
            cluster: runs the processes in place of this machine.
        """
        self.base_model = base_model
        self.settings = settings
        self.name = name or short_name(base_model)
        self.one_policy = isinstance(settings.engine, VllmConfig) and settings.engine.weights == "merged"
        """Whether the engine holds one policy at a time (`weights="merged"`), so that each load replaces the last."""
        self._data_dir = data_dir
        self._renderer: Renderer | None = None
        self._loading = asyncio.Lock()
        self._proving = asyncio.Lock()
        self._proved: set[str] = set()
        """LoRA settings whose layers the engine was proved to serve, without their seed."""
        self._at_step: tuple[float, float, float] | None = None
        """Time at the end of the last training step, and how long engine and trainer had worked until then."""
        self._devices = devices or find_devices()
        self.placement = (
            choose_placement(settings, self._devices, in_use) if cluster is None else place_on(str(config.cluster))
        )
        self._shares_gpu = self.placement.shared and self.placement.trainer.kind == "cuda"
        if cluster is None:
            threads = split_threads(settings.engine.num_threads, settings.trainer.num_threads)
            self._replica_threads, self._trainer_threads = (
                max(1, threads[0] // settings.engine.num_replicas),
                threads[1],
            )
        else:  # the cluster reserves that many cores for each process
            self._replica_threads = settings.engine.num_threads or 1
            self._trainer_threads = settings.trainer.num_threads or 1

        def spec(
            kind: WorkerKind, module: str, num_threads: int, on: AssignedDevices, number: int | None = None
        ) -> ChildSpec:
            name = f"{kind} of {self.name}" if number is None else f"{kind} {number} of {self.name}"
            variables = on.environment(self._devices)
            launcher: Launcher = LocalLauncher(warm_parent if on.kind == "cpu" and module != "vllm_child" else None)
            if cluster is not None:
                launcher = cluster.launcher(kind, name, settings)
            if kind == "trainer" and on.kind == "cuda" and not any(map(os.environ.get, ALLOCATOR_VARIABLES)):
                # Its micro-batches differ in size, which fragments fixed segments.
                variables |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
            return ChildSpec(
                name=name,
                module=f"art.worker.{module}",
                log_path=data_dir.logs / f"{kind}{'' if number is None else number}-{self.name}.log",
                num_threads=num_threads,
                config=config,
                is_new=is_new,
                variables=variables,
                launcher=launcher,
                place=f"{on} ({on.reason})",
            )

        engine_module = "vllm_child" if isinstance(settings.engine, VllmConfig) else "engine_child"
        num_replicas = settings.engine.num_replicas
        engine_specs = [
            spec("engine", engine_module, self._replica_threads, devices, None if num_replicas == 1 else number)
            for number, devices in enumerate(self.placement.engine.split(num_replicas), 1)
        ]
        trainer_spec = spec("trainer", "trainer_child", self._trainer_threads, self.placement.trainer)
        self.engine = GatedEngine(
            f"engine of {self.name}", engine_specs, self._start_engine, settings.engine.num_at_once, make_process
        )
        self.adapters = AdapterTable(self.engine, config, one_policy=self.one_policy, sleeps=self.placement.sleeps)
        self.trainer = TrainerHandle(
            trainer_spec, self._start_trainer, self._engine_aside, data_dir.samples.absolute(), make_process
        )
        self.trainer_process = self.trainer.process
        self.engine_process = self.engine.replicas[0].process
        """The process of the first replica, as a rule the only one."""
        self.processes = [*(replica.process for replica in self.engine.replicas), self.trainer_process]

    # -- its processes --

    def start(self) -> None:
        """Start the engine processes and the trainer process in the background."""
        for process in self.processes:
            process.start()

    def retry(self) -> None:
        """Start each process that has failed without a further pause, since the reason may be gone."""
        for process in self.processes:
            if process.has_failed:
                process.start()

    def note_registered(self) -> None:
        """From now on a process that cannot start is not the fault of a request: its settings were accepted."""
        for process in self.processes:
            process.is_new = False

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in self.processes))

    async def _start_engine(self, replica: EngineReplica, client: RpcClient) -> None:
        engine = self.settings.engine
        running = None if engine.max_running is None else engine.max_running + SCORING_PLACES
        config = engine.model_copy(update={"num_threads": self._replica_threads, "max_running": running})
        if isinstance(config, EngineConfig):
            call: StartEngine | StartVllm = StartEngine(
                model=self.base_model, config=config, quantization=self.settings.trainer.quantization
            )
        else:  # an engine with adapters has a rank: the settings refuse full fine-tuning for it
            lora = None if self.one_policy else self.settings.lora
            call = StartVllm(
                model=self.base_model,
                config=config,
                lora_rank=None if lora is None else lora.rank,
                sleeps=self.placement.sleeps,
                memory_bytes=smallest_memory(self.placement.engine, self._devices),
                work_dir=self._work_dir(replica) if self.one_policy else None,
            )
        async with self._alone_on_gpu():
            info = await client.call(call)
        if info.max_running is not None:
            replica.num_seats = max(1, info.max_running - SCORING_PLACES)
        await self.adapters.restore(replica, client)

    def _work_dir(self, replica: EngineReplica) -> Path:
        """The folder in which a replica merges weights."""
        folder = self._data_dir.merged(self.name).absolute()
        return folder if len(self.engine.replicas) == 1 else folder / str(replica.number + 1)

    async def _start_trainer(self, client: RpcClient) -> None:
        config = self.settings.trainer.model_copy(update={"num_threads": self._trainer_threads})
        async with self._alone_on_gpu():
            await client.call(
                StartTrainer(model=self.base_model, name=self.base_model, config=config, shares_gpu=self._shares_gpu)
            )

    def _alone_on_gpu(self) -> AbstractAsyncContextManager[Any]:
        """Let engine and trainer load one after the other where they share a GPU.

        Both measure its free memory while they load, and vLLM refuses to start if another process changes it.
        """
        return self._loading if self._shares_gpu else nullcontext()

    @asynccontextmanager
    async def _engine_aside(self) -> AsyncIterator[None]:
        """During the body the engine sleeps and requests wait, where engine and trainer share a device."""
        if not self.placement.sleeps:
            yield
            return
        what = f"loads into the {self.engine.name} to end, so that it can sleep"
        with self.engine.closed.held():
            async with self.adapters.no_loads(what), self.engine.asleep():
                yield

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

    # -- what it is --

    async def renderer(self) -> Renderer:
        """
        Raises:
            ProcessError: the folder of the base model is not there now, though the model was registered with it.
            ConfigError: the base model has no chat template that can be used.
        """

        def load() -> Renderer:
            if looks_like_path(self.base_model) and not Path(self.base_model).is_dir():
                raise ProcessError(
                    f"the folder of base model {self.name!r} is not there now; bring it back, and requests go on"
                )
            return load_renderer(self.base_model, self.settings.render)

        if self._renderer is None:
            self._renderer = await asyncio.to_thread(load)
        return self._renderer

    async def engine_info(self) -> EngineInfo:
        return await self.engine.info()

    def memory_plan(self) -> MemoryPlan | None:
        """What the memory of engine and trainer is forecast from; `None` if the base model's shape is unknown."""
        shape = read_shape(self.base_model)
        return None if shape is None else MemoryPlan(self.placement, self.settings, self._devices, shape)

    @property
    def engine_dtype(self) -> str:
        """Number type in which the engine computes log-probs, e.g. "bfloat16", or `QUANTIZED`."""
        engine, info = self.settings.engine, self.engine.known_info
        if isinstance(engine, VllmConfig) and engine.is_quantized:
            return QUANTIZED
        if engine.dtype != "auto":
            return engine.dtype
        return info.dtype if info is not None else "float32" if self.placement.engine.kind == "cpu" else "bfloat16"

    @property
    def num_trainer_devices(self) -> int:
        return max(1, len(self.placement.trainer.indices))

    def end_of_step(self) -> dict[str, float]:
        """Return metrics of how engine and trainer spent the time since the last call, as a rule since the end of the
        step before; nothing at the first."""
        before, now = self._at_step, (time.monotonic(), self.engine.busy_s, self.trainer.busy_s)
        self._at_step = now
        if before is None:
            return {}
        seconds, engine_s, trainer_s = (after - earlier for after, earlier in zip(now, before, strict=True))
        return {
            "time/since_last_step_s": seconds,
            "time/engine_idle_share": min(1.0, max(0.0, 1 - engine_s / seconds)),
            "time/trainer_idle_share": min(1.0, max(0.0, 1 - trainer_s / seconds)),
        }

    def status(self) -> dict[str, Any]:
        placement, info = self.placement, self.engine.known_info
        parts = {"engine": placement.engine, "trainer": placement.trainer}
        placed = {part: {"devices": str(devices), "reason": devices.reason} for part, devices in parts.items()}
        return {
            "base_model": self.base_model,
            "engine": self.engine_process.status | {"state": self.engine.state},
            "replicas": [replica.status for replica in self.engine.replicas],
            "trainer": self.trainer_process.status,
            "placement": {**placed, "sleeps": placement.sleeps},
            "engine_info": asdict(info) if info else None,
            "adapters": self.adapters.names,
        }


def short_name(base_model: str) -> str:
    """Return the last part of a hub id or path: `org/model` and `/some/where/model` are both `model`."""
    return base_model.rstrip("/").rsplit("/", 1)[-1]


class Hosts:
    """Creates the host of a base model when a model first needs it, and ends it when no model needs it any more."""

    def __init__(
        self,
        data_dir: DataDir,
        config: ServerConfig,
        devices: Devices | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        """By default the `devices` of this machine are looked for. With a `cluster` all processes run there instead."""
        self._cluster = cluster
        self._devices = devices
        self._data_dir = data_dir
        self._config = config
        self._warm_parent = WarmParent()
        self._hosts: dict[str, BaseModelHost] = {}
        self._pinned: set[str] = set()
        """Keys of hosts that run whether or not a model uses them."""

    def of(self, model: RegisteredModel, *, is_new: bool = False) -> BaseModelHost:
        """The host of a model. `is_new` says that the model is being registered, should its host have to be made."""
        return self._of(model.host_key, model.base_model, model.settings, is_new=is_new)

    def existing(self, model: RegisteredModel) -> BaseModelHost | None:
        """The host of a model if it was made already. May be called from any thread."""
        return self._hosts.get(model.host_key)

    async def warm_up(self) -> None:
        """Start what forks engines and trainers that compute on the CPU, so that the first model is up sooner."""
        await self._warm_parent.start(child_environment(1, {VISIBLE: ""}))

    def pin(self, base_model: str, settings: ModelSettings) -> None:
        """Start the processes of a base model and keep them running, whether or not a model uses them."""
        key = host_key(base_model, settings)
        self._pinned.add(key)
        self._of(key, base_model, settings).start()

    def pinned(self) -> list[BaseModelHost]:
        return [host for key, host in self._hosts.items() if key in self._pinned]

    def _of(self, key: str, base_model: str, settings: ModelSettings, *, is_new: bool = False) -> BaseModelHost:
        if key not in self._hosts:
            # A name for its processes and logs that no other host has.
            name, taken = short_name(base_model), {host.name for host in self._hosts.values()}
            names = [name, *(f"{name}-{number}" for number in range(2, len(taken) + 2))]
            name = next(name for name in names if name not in taken)
            settings = self._with_replicas(settings, self._devices)
            self._hosts[key] = BaseModelHost(
                base_model, settings, self._data_dir, self._config, name, self._warm_parent,
                in_use=self._in_use(), is_new=is_new, devices=self._devices, cluster=self._cluster,
            )  # fmt: skip
        return self._hosts[key]

    def placement_of(self, model: RegisteredModel, devices: Devices) -> tuple[Placement, ModelSettings]:
        """Return the devices that engine and trainer of a model have, or would get now, and its settings with the
        number of replicas that it has there."""
        if (host := self.existing(model)) is not None:
            return host.placement, host.settings
        settings = self._with_replicas(model.settings, devices)
        if self._cluster is not None:
            return place_on(str(self._config.cluster)), settings
        return choose_placement(settings, devices, self._in_use()), settings

    def _with_replicas(self, settings: ModelSettings, devices: Devices | None) -> ModelSettings:
        if settings.engine.replicas != "auto":
            return settings
        if self._cluster is not None:
            return with_replicas(settings, self._cluster.replicas_beside_trainer(settings))
        return with_replicas(settings, replicas_beside_trainer(settings, devices or find_devices()))

    def _in_use(self) -> Counter[int]:
        """Count the engines and trainers on each GPU."""
        placements = [host.placement for host in self._hosts.values()]
        return Counter(index for one in placements for index in (*one.engine.indices, *one.trainer.indices))

    async def close_unused(self, models: Iterable[RegisteredModel]) -> None:
        """End the hosts that none of `models` uses. Pinned hosts keep running."""
        await self._close({model.host_key for model in models} | self._pinned)

    async def _close(self, needed: set[str]) -> None:
        unused = [self._hosts.pop(key) for key in list(self._hosts) if key not in needed]
        await asyncio.gather(*(host.close() for host in unused))

    async def close(self) -> None:
        await self._close(set())
        await self._warm_parent.close()

    def all(self) -> list[BaseModelHost]:
        return list(self._hosts.values())

    def processes(self) -> list[ChildProcess]:
        return [process for host in self._hosts.values() for process in host.processes]

    def status(self) -> list[dict[str, Any]]:
        return [host.status() for host in self._hosts.values()]
