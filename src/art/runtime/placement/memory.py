"""Forecast the memory of each device under a placement, at the moment when it needs most.

    CPU, or a GPU for each      engine + trainer at its peak
    one GPU, vLLM sleeps        the larger of: engine asleep + trainer at its peak; engine awake + trainer between steps

Main memory is a device too: it holds the processes, and the weights of an engine that sleeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from art.config import ModelSettings
from art.memory.activations import Batch
from art.memory.engine import EngineForecast, forecast_engine, sleeping_weights
from art.memory.machine import packed_limit
from art.memory.parts import GIB, Part, total
from art.memory.shape import ModelShape
from art.memory.trainer import CPU_TOKENS, PROCESS_BYTES, TrainerForecast, TrainerSetup, choose_mode, forecast_trainer
from art.runtime.placement.devices import Devices
from art.runtime.placement.placement import ELSEWHERE, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceForecast:
    """The forecast memory of one device at the moment when it needs most."""

    where: str
    gpu_index: int | None
    """`None` for main memory."""
    limit_bytes: int
    moment: str
    """When it needs most, e.g. "while the trainer works"."""
    parts: tuple[Part, ...]
    unavoidable: tuple[Part, ...]
    """What engine and trainer need of it, whatever the micro-batches and the size of the KV cache."""

    @property
    def needed_bytes(self) -> int:
        return total(self.parts)

    @property
    def is_short(self) -> bool:
        return self.needed_bytes > self.limit_bytes

    def __str__(self) -> str:
        need, limit = self.needed_bytes / GIB, self.limit_bytes / GIB
        return f"{self.where} needs {need:.1f} of {limit:.1f} GiB {self.moment}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Everything that the memory of engine and trainer is forecast from."""

    placement: Placement
    settings: ModelSettings
    devices: Devices
    shape: ModelShape

    @property
    def setup(self) -> TrainerSetup:
        """The trainer's settings, with the checkpointing that "auto" is expected to choose on a GPU."""
        kind, settings = self.placement.trainer.kind, self.settings
        limit = packed_limit(self.devices.memory_bytes) if kind == "cpu" else 0
        setup = TrainerSetup(config=settings.trainer, lora=settings.lora, device=kind, packed_limit_bytes=limit)
        rooms = [room for index in self.placement.trainer.indices if (room := self._room_of_trainer(index)) is not None]
        is_auto = kind == "cuda" and settings.trainer.gradient_checkpointing == "auto"
        return choose_mode(self.shape, setup, self.batch, min(rooms)) if is_auto and rooms else setup

    def _room_of_trainer(self, index: int) -> int | None:
        """What the engine leaves of a GPU while the trainer works; `None` if the GPU's memory is unknown."""
        if (limit := self.gpu_bytes(index)) is None or index not in self.placement.engine.indices:
            return limit
        engine = self.engine(limit)
        return limit - total(engine.asleep if self.placement.sleeps else engine.awake)

    @property
    def context(self) -> int:
        """Most tokens of a sample. A sample above the micro-batch's limit has a micro-batch of its own."""
        return self.settings.engine.max_context or self.shape.max_context

    @property
    def batch(self) -> Batch:
        """The largest micro-batch of several samples."""
        num_tokens = self.settings.trainer.max_tokens
        if self.placement.trainer.kind == "cpu":
            num_tokens = min(num_tokens, CPU_TOKENS)
        return Batch(num_tokens, longest=min(num_tokens, self.context))

    @property
    def longest_sample(self) -> Batch:
        """The micro-batch of one sample as long as the context."""
        return Batch(self.context, longest=self.context, num_sequences=1)

    @property
    def cpu_copies(self) -> int:
        """Number of trainer processes that share main memory."""
        return self.settings.trainer.num_processes if self.placement.trainer.kind != "cuda" else 1

    def trainer(self, batch: Batch | None = None) -> TrainerForecast:
        """Forecast one trainer process with micro-batches such as `batch`, by default `self.batch`."""
        return forecast_trainer(self.shape, self.setup, batch or self.batch)

    def engine(self, limit_bytes: int) -> EngineForecast:
        """Forecast the engine on one of its devices, which has `limit_bytes` of memory."""
        kind, settings = self.placement.engine.kind, self.settings
        return forecast_engine(self.shape, settings.engine, settings.lora, device=kind, limit_bytes=limit_bytes)

    def gpu_bytes(self, index: int) -> int | None:
        """The memory of a GPU; `None` if it is unknown."""
        gpus = self.devices.gpus or ()
        return gpus[index].memory_bytes if 0 <= index < len(gpus) else None


def forecast_devices(plan: MemoryPlan, batch: Batch | None = None) -> list[DeviceForecast]:
    """Forecast each GPU whose memory is known, then main memory.

    Args:
        batch: the trainer's micro-batch; by default the largest that `trainer.max_tokens` allows.
    """
    trainer = plan.trainer(batch)
    return [*_gpus(plan, trainer), _main_memory(plan, trainer)]


def _gpus(plan: MemoryPlan, trainer: TrainerForecast) -> Iterator[DeviceForecast]:
    placement = plan.placement
    for index in sorted({*placement.engine.indices, *placement.trainer.indices}):
        if (limit := plan.gpu_bytes(index)) is None:
            continue
        engine = plan.engine(limit) if index in placement.engine.indices else None
        awake, asleep, least = (engine.awake, engine.asleep, engine.least) if engine else ((), (), ())
        peak, resting = (trainer.parts, trainer.fixed) if index in placement.trainer.indices else ((), ())
        moments = {"while the trainer works": (asleep if placement.sleeps else awake) + peak}
        if placement.sleeps:
            moments["while the engine samples"] = awake + resting
        moment = max(moments, key=lambda name: total(moments[name]))
        gpus = plan.devices.gpus or ()
        yield DeviceForecast(
            where=f"cuda:{index} ({gpus[index].name})",
            gpu_index=index,
            limit_bytes=limit,
            moment=moment,
            parts=moments[moment],
            unavoidable=_needed(least + resting),
        )


def _main_memory(plan: MemoryPlan, trainer: TrainerForecast) -> DeviceForecast:
    placement, settings, limit = plan.placement, plan.settings, plan.devices.memory_bytes
    parts: tuple[Part, ...] = ()
    unavoidable: tuple[Part, ...] = ()
    if placement.engine.kind == "cuda":
        parts = unavoidable = plan.engine(limit).host
    elif placement.engine.kind != ELSEWHERE:
        engine = plan.engine(limit)
        parts, unavoidable = engine.awake, engine.least
    if placement.sleeps and placement.engine.kind == "cuda":
        copy = sleeping_weights(plan.shape, settings.engine)
        parts, unavoidable = (*parts, copy), (*unavoidable, copy)
    if placement.trainer.kind == "cuda":
        num_processes = settings.trainer.num_processes
        process = Part("trainer", "processes in main memory", num_processes * PROCESS_BYTES["cpu"])
        parts, unavoidable = (*parts, process), (*unavoidable, process)
    else:
        parts += _times(plan.cpu_copies, trainer.parts)
        unavoidable += _times(plan.cpu_copies, trainer.fixed)
    return DeviceForecast(
        where="this machine",
        gpu_index=None,
        limit_bytes=limit,
        moment="while the trainer works",
        parts=parts,
        unavoidable=_needed(unavoidable),
    )


def _needed(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(part for part in parts if not part.is_optional)


def _times(count: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(replace(part, size_bytes=count * part.size_bytes) for part in parts)
