"""Forecast the memory of each device under a placement, at the moment when it needs most. Refuse what cannot fit before
any process starts, and say what to change where a forecast is short.

    CPU, or a GPU for each      engine + trainer at its peak
    one GPU, vLLM sleeps        the larger of: engine asleep + trainer at its peak; engine awake + trainer between steps

Main memory is a device too: it holds the processes, and the weights of an engine that sleeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from art.config import ModelSettings, VllmConfig
from art.errors import ConfigError
from art.memory import (
    CPU_TOKENS,
    GIB,
    MODES,
    PROCESS_BYTES,
    EngineForecast,
    ModelShape,
    Part,
    TrainerSetup,
    forecast_engine,
    memory_share,
    total,
)
from art.protocol.training import CheckResult, CheckStatus, MemoryPart
from art.runtime.placement import ELSEWHERE, Devices, Placement

NAME = "memory forecast"
_UNCERTAINTY = 1.25
"""The forecast may be this many times what is needed (docs/real_model.md). If main memory is exceeded by more, the
system ends the trainer: a failure. A GPU's is a warning, since micro-batches are made smaller when it runs out."""
_SHARE_MARGIN = 0.01
"""How much less than the largest possible share of a GPU is advised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceForecast:
    """The forecast memory of one device at the moment when it needs most."""

    where: str
    gpu_index: int | None
    """`None` for main memory."""
    limit_bytes: int
    moment: str = "while the trainer works"
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
    def trainer(self) -> TrainerSetup:
        """The trainer, with the checkpointing that "auto" is expected to choose on a GPU."""
        settings, placement, setting = self.settings, self.placement, self.settings.trainer.gradient_checkpointing
        setup = TrainerSetup(
            shape=self.shape, config=settings.trainer, lora=settings.lora, device=placement.trainer.kind,
            checkpointing="full" if setting is True else "selective" if setting == "selective" else "none",
        )  # fmt: skip
        rooms = []  # what the engine leaves of each GPU while the trainer works
        for index in placement.trainer.indices:
            if (limit := self.gpu_bytes(index)) is not None:
                if index in placement.engine.indices:
                    engine = self.engine(limit)
                    limit -= total(engine.asleep if placement.sleeps else engine.awake)
                rooms.append(limit)
        if placement.trainer.kind != "cuda" or setting != "auto" or not rooms:
            return setup
        setups = [replace(setup, checkpointing=mode) for mode in MODES]
        return next((one for one in setups if total(one.at_peak(self.num_tokens)) <= min(rooms)), setups[-1])

    @property
    def num_tokens(self) -> int:
        """Most tokens of a micro-batch of several samples."""
        limit = CPU_TOKENS if self.placement.trainer.kind == "cpu" else math.inf
        return int(min(self.settings.trainer.max_tokens, limit))

    @property
    def cpu_copies(self) -> int:
        """Number of trainer processes that share main memory."""
        return self.settings.trainer.num_processes if self.placement.trainer.kind != "cuda" else 1

    def engine(self, limit_bytes: int) -> EngineForecast:
        """Forecast a replica of the engine on one of its devices, which has `limit_bytes` of memory."""
        kind = self.placement.engine.kind
        return forecast_engine(self.shape, self.settings.engine, device=kind, limit_bytes=limit_bytes)

    def gpu_bytes(self, index: int) -> int | None:
        """The memory of a GPU; `None` if it is unknown."""
        gpus = self.devices.gpus or ()
        return gpus[index].memory_bytes if 0 <= index < len(gpus) else None


def forecast_devices(plan: MemoryPlan) -> list[DeviceForecast]:
    """Forecast each GPU whose memory is known, then main memory."""
    placement, trainer = plan.placement, plan.trainer
    nothing: tuple[Part, ...] = ()
    peak, resting = trainer.at_peak(plan.num_tokens), trainer.between_steps()
    forecasts = []
    for index in sorted({*placement.engine.indices, *placement.trainer.indices}):
        if (limit := plan.gpu_bytes(index)) is None:
            continue
        awake = asleep = least = nothing
        if index in placement.engine.indices:
            engine = plan.engine(limit)
            awake, asleep, least = engine.awake, engine.asleep, engine.least
        own_peak, own_resting = (peak, resting) if index in placement.trainer.indices else (nothing, nothing)
        moments = {"while the trainer works": (asleep if placement.sleeps else awake) + own_peak}
        if placement.sleeps:
            moments["while the engine samples"] = awake + own_resting
        moment = max(moments, key=lambda name: total(moments[name]))
        where = f"cuda:{index} ({(plan.devices.gpus or ())[index].name})"
        forecasts.append(
            DeviceForecast(
                where=where, gpu_index=index, limit_bytes=limit, moment=moment, parts=moments[moment],
                unavoidable=least + own_resting,
            )
        )  # fmt: skip
    # Main memory: the processes, what computes on the CPU, and the weights of an engine that sleeps.
    limit, parts, unavoidable = plan.devices.memory_bytes, nothing, nothing
    if placement.engine.kind != ELSEWHERE:
        engine = plan.engine(limit)
        parts, unavoidable = engine.awake, engine.least
        if placement.engine.kind == "cuda":
            parts = unavoidable = (engine.host, *((engine.copy,) if placement.sleeps else ()))
        num_replicas = plan.settings.engine.num_replicas
        parts, unavoidable = _times(num_replicas, parts), _times(num_replicas, unavoidable)
    if placement.trainer.kind == "cuda":
        size_bytes = plan.settings.trainer.num_processes * PROCESS_BYTES
        peak = resting = (Part("trainer", "processes in main memory", size_bytes),)
    parts += _times(plan.cpu_copies, peak)
    unavoidable += _times(plan.cpu_copies, resting)
    main = DeviceForecast(where="this machine", gpu_index=None, limit_bytes=limit, parts=parts, unavoidable=unavoidable)
    return [*forecasts, main]


def _times(count: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(replace(part, size_bytes=count * part.size_bytes) for part in parts)


def check_memory(plan: MemoryPlan) -> None:
    """Refuse settings with which engine and trainer cannot work, whatever the micro-batches. Raises `ConfigError` if
    what they need between steps does not fit, or vLLM's share of a GPU leaves too little for the trainer, or for its
    own weights and one request."""
    for device in forecast_devices(plan):
        if isinstance(plan.settings.engine, VllmConfig) and device.gpu_index in plan.placement.engine.indices:
            _check_share(plan, device, memory_share(plan.settings.engine))
        elif (needed := total(device.unavoidable)) > device.limit_bytes:
            large = [part for part in sorted(device.unavoidable, key=_size, reverse=True) if _size(part) >= GIB / 20]
            raise ConfigError(
                f"{device.where} has {device.limit_bytes / GIB:.1f} GiB, but engine and trainer need at least "
                f"{needed / GIB:.1f} GiB of it: {', '.join(map(str, large))}. {_remedy(device)}",
                param="device",
            )


def _remedy(device: DeviceForecast) -> str:
    is_shared = device.gpu_index is not None and len({part.owner for part in device.unavoidable}) > 1
    split = "Give engine and trainer different GPUs by `device_indices`. " if is_shared else ""
    largest = max((part for part in device.unavoidable if part.remedy), key=_size)
    return f"{split}For the {largest.name} of the {largest.owner}: {largest.remedy}"


def _size(part: Part) -> int:
    return part.size_bytes


def _check_share(plan: MemoryPlan, device: DeviceForecast, share: float) -> None:
    """Refuse a share of a GPU that leaves too little for vLLM's model and one request, or for the trainer on that GPU.

    vLLM takes its share at once, whatever the model's size. While it sleeps the trainer can use that memory for
    activations, so only what the trainer keeps between steps limits the share. Without sleep the trainer's peak does.
    """
    limit, trainer_bytes = device.limit_bytes, 0
    if device.gpu_index in plan.placement.trainer.indices:
        setup = plan.trainer
        trainer_bytes = total(setup.between_steps() if plan.placement.sleeps else setup.at_peak(plan.num_tokens))
    least, most = total(plan.engine(limit).least) / limit, 1 - trainer_bytes / limit
    if least <= share <= most:
        return
    beside = f" and the trainer needs {trainer_bytes / GIB:.1f} GiB of it" if trainer_bytes else ""
    problem = (
        f"vLLM takes {share:.0%} of {device.where}, which has {limit / GIB:.1f} GiB, but vLLM itself needs at least "
        f"{least * limit / GIB:.1f} GiB{beside}"
    )
    advised = math.floor(100 * (most - _SHARE_MARGIN)) / 100
    if advised <= 0 or advised < least:
        split = " Give them different GPUs by `device_indices`, or change the largest part." if trainer_bytes else ""
        raise ConfigError(f"{problem}: no share suffices.{split} {_remedy(device)}", param="flags")
    raise ConfigError(
        f"{problem}. Set `flags` to {{'gpu_memory_utilization': {advised:.2f}}}"
        f"{', or give them different GPUs by `device_indices`' if trainer_bytes else ''}",
        param="flags",
    )


def check_forecast(plan: MemoryPlan | None) -> CheckResult:
    """Check that the largest micro-batch of several samples fits. Without a plan the base model's shape is unknown."""
    if plan is None:
        unknown = "not forecast: the base model's config.json is not on this machine, or lacks the sizes of a decoder"
        return CheckResult(name=NAME, status="ok", found=unknown)
    return check_devices(forecast_devices(plan), plan.num_tokens)


def check_devices(devices: Sequence[DeviceForecast], num_tokens: int) -> CheckResult:
    """Check that what is forecast for each device fits, with micro-batches of `num_tokens`."""
    status: CheckStatus = "ok"
    remedies = []
    for device in devices:
        if device.is_short:
            is_fatal = device.gpu_index is None and device.needed_bytes > _UNCERTAINTY * device.limit_bytes
            status = "failure" if is_fatal or status == "failure" else "warning"
            largest = max((part for part in device.parts if part.remedy), key=_size)
            missing = f"{(device.needed_bytes - device.limit_bytes) / GIB:.1f} GiB are missing on {device.where}"
            takes = f"the {largest.name} of the {largest.owner} take {largest.size_bytes / GIB:.1f} GiB"
            remedies.append(f"{missing}; {takes}: {largest.remedy}")
    return CheckResult(
        name=NAME,
        status=status,
        found=f"with micro-batches of {num_tokens:,} tokens, {'; '.join(map(str, devices))}",
        remedy="; ".join(remedies) or None,
        measured={
            f"{kind} bytes of {device.where}": float(value)
            for device in devices
            for kind, value in (("needed", device.needed_bytes), ("available", device.limit_bytes))
        },
        memory=[
            MemoryPart(where=device.where, owner=part.owner, name=part.name, size_bytes=part.size_bytes)
            for device in devices
            for part in device.parts
        ],
    )
