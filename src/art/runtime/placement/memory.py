"""Forecast the memory of each device under a placement, at the moment when it needs most. Refuse what cannot fit before
any process starts, and say what to change where a forecast is short.

    CPU, or a GPU for each      engine + trainer at its peak
    one GPU, vLLM sleeps        the larger of: engine asleep + trainer at its peak; engine awake + trainer between steps

Main memory is a device too: it holds the processes, and the weights of an engine that sleeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from art.config import ModelSettings, VllmConfig
from art.errors import ConfigError
from art.memory.activations import Batch
from art.memory.engine import EngineForecast, forecast_engine, memory_share, sleeping_weights
from art.memory.shape import GIB, ModelShape, Part, total
from art.memory.trainer import (
    CPU_TOKENS,
    PROCESS_BYTES,
    TrainerForecast,
    TrainerSetup,
    choose_mode,
    forecast_trainer,
    largest_batch,
    with_checkpointing,
)
from art.protocol.preflight import CheckResult, CheckStatus, MemoryPart
from art.runtime.placement.placement import ELSEWHERE, Devices, Placement


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
        setup = TrainerSetup(config=settings.trainer, lora=settings.lora, device=kind)
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


_SHARE_MARGIN = 0.01
"""How much less than the largest possible share of a GPU is advised."""
_FEWEST_TOKENS = 64
"""The least value of `trainer.max_tokens`."""


def check_memory(plan: MemoryPlan) -> None:
    """Refuse settings with which engine and trainer cannot work, whatever the micro-batches.

    Raises:
        ConfigError: what they need between steps does not fit, or vLLM's share of a GPU leaves too little for the
            trainer, or for its own weights and one request.
    """
    for device in forecast_devices(plan):
        shares = None if device.gpu_index is None else share_range(plan, device.gpu_index)
        if shares is not None:
            _check_share(plan, device, shares)
        elif total(device.unavoidable) > device.limit_bytes:
            raise ConfigError(
                f"{device.where} has {device.limit_bytes / GIB:.1f} GiB, but engine and trainer need at least "
                f"{total(device.unavoidable) / GIB:.1f} GiB of it: {_listed(device.unavoidable)}. {_remedy(device)}",
                param="device",
            )


def _remedy(device: DeviceForecast) -> str:
    is_shared = device.gpu_index is not None and len({part.owner for part in device.unavoidable}) > 1
    split = "Give engine and trainer different GPUs by `device_indices`. " if is_shared else ""
    largest = max((part for part in device.unavoidable if part.remedy), key=lambda part: part.size_bytes)
    return f"{split}For the {largest.name} of the {largest.owner}: {largest.remedy}"


def _listed(parts: tuple[Part, ...]) -> str:
    large = sorted((part for part in parts if part.size_bytes >= GIB / 20), key=lambda part: -part.size_bytes)
    return ", ".join(map(str, large))


# -- vLLM's share of a GPU --


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRange:
    """The shares of a GPU's memory that vLLM can take."""

    least: float
    """With less, vLLM does not hold the model and one request."""
    most: float
    """With more, the trainer on the same GPU has no room."""

    @property
    def advised(self) -> float | None:
        """The largest share of two decimals that is below `most` by a margin; `None` if vLLM does not fit into that."""
        share = math.floor(100 * (self.most - _SHARE_MARGIN)) / 100
        return share if share > 0 and share >= self.least else None


def share_range(plan: MemoryPlan, index: int) -> ShareRange | None:
    """Return the shares that vLLM can take of a GPU; `None` if vLLM is not there, or its memory is unknown.

    vLLM takes its share at once, whatever the model's size. While it sleeps the trainer can use that memory for
    activations, so only what the trainer keeps between steps limits the share. Without sleep the trainer's peak does.
    """
    limit = plan.gpu_bytes(index)
    if limit is None or not isinstance(plan.settings.engine, VllmConfig) or index not in plan.placement.engine.indices:
        return None
    trainer_bytes = 0
    if index in plan.placement.trainer.indices:
        trainer = plan.trainer()
        trainer_bytes = trainer.fixed_bytes if plan.placement.sleeps else trainer.peak_bytes
    return ShareRange(least=total(plan.engine(limit).least) / limit, most=1 - trainer_bytes / limit)


def _check_share(plan: MemoryPlan, device: DeviceForecast, shares: ShareRange) -> None:
    assert isinstance(plan.settings.engine, VllmConfig)
    share = memory_share(plan.settings.engine)
    if shares.least <= share <= shares.most:
        return
    vllm = f"vLLM takes {share:.0%} of {device.where}, which has {device.limit_bytes / GIB:.1f} GiB"
    trainer = round((1 - shares.most) * device.limit_bytes / GIB, 1)
    beside = f" and the trainer needs {trainer} GiB of it" if trainer else ""
    needs = f"vLLM itself needs at least {shares.least * device.limit_bytes / GIB:.1f} GiB{beside}"
    if shares.advised is None:
        split = " Give them different GPUs by `device_indices`, or change the largest part." if trainer else ""
        raise ConfigError(
            f"{vllm}, but {needs}: no share suffices.{split} {_remedy(device)}",
            param="flags",
        )
    raise ConfigError(
        f"{vllm}, but {needs}. Set `flags` to {{'gpu_memory_utilization': {shares.advised:.2f}}}"
        f"{', or give them different GPUs by `device_indices`' if trainer else ''}",
        param="flags",
    )


# -- a forecast that is short --


def advise(plan: MemoryPlan, short: DeviceForecast) -> str:
    """Say what to change so that a device's forecast fits, with numbers where they can be computed."""
    missing = (short.needed_bytes - short.limit_bytes) / GIB
    growing = total(part for part in short.parts if part.grows_with_tokens)
    room = (short.limit_bytes - short.needed_bytes) // plan.cpu_copies + plan.trainer().peak_bytes
    if growing and (advice := _token_advice(plan, room)):
        return f"{missing:.1f} GiB are missing: {advice}"
    largest = max((part for part in short.parts if part.remedy), key=lambda part: part.size_bytes)
    name = f"{largest.name} of the {largest.owner}"
    return f"{missing:.1f} GiB are missing. The largest part is the {name}: {largest.remedy}"


def _token_advice(plan: MemoryPlan, room_bytes: int) -> str:
    """Say which micro-batches a trainer process fits into `room_bytes` with, without and with checkpointing."""
    setup, advice = plan.setup, []
    if (tokens := largest_batch(plan.shape, setup, room_bytes)) >= _FEWEST_TOKENS:
        advice.append(f"set `trainer.max_tokens` to at most {tokens:,}")
    if setup.checkpointing == "none":
        saving = with_checkpointing(setup)
        if forecast_trainer(plan.shape, saving, plan.batch).peak_bytes <= room_bytes:
            advice.append("set `trainer.gradient_checkpointing`")
        elif (more := largest_batch(plan.shape, saving, room_bytes)) >= _FEWEST_TOKENS:
            advice.append(f"set `trainer.gradient_checkpointing` and `trainer.max_tokens` to at most {more:,}")
    return ", or ".join(advice)


NAME = "memory forecast"
_UNCERTAINTY = 1.25
"""The forecast may be this many times what is needed (docs/multi_gpu.md). If main memory is exceeded by more than that,
the system ends the trainer: a failure. A GPU's is a warning, since micro-batches are made smaller when it runs out."""


def check_forecast(plan: MemoryPlan | None) -> CheckResult:
    """Check that the largest micro-batch of several samples fits, and a sample as long as the context.

    Args:
        plan: what to forecast; `None` if the shape of the base model is unknown.
    """
    if plan is None:
        unknown = "not forecast: the base model's config.json is not on this machine, or lacks the sizes of a decoder"
        return CheckResult(name=NAME, status="ok", found=unknown)
    devices = forecast_devices(plan)
    batch = f"micro-batches of {plan.batch.num_tokens:,} tokens"
    needs = f"with {batch}, {'; '.join(map(str, devices))}"
    status: CheckStatus = "ok"
    remedies = []
    for device in devices:
        if device.is_short:
            is_fatal = device.gpu_index is None and device.needed_bytes > _UNCERTAINTY * device.limit_bytes
            status = "failure" if is_fatal or status == "failure" else "warning"
            remedies.append(f"{_largest(device)} on {device.where}; {advise(plan, device)}")
    if not remedies and (remedy := _check_longest(plan)):
        status, remedies = "warning", [remedy]
    return CheckResult(
        name=NAME,
        status=status,
        found=needs,
        remedy="; ".join(remedies) or None,
        measured={
            f"{kind} bytes of {device.where}": float(value) for device in devices for kind, value in _sums(device)
        },
        memory=[
            MemoryPart(where=device.where, owner=part.owner, name=part.name, size_bytes=part.size_bytes)
            for device in devices
            for part in device.parts
        ],
    )


def _sums(device: DeviceForecast) -> tuple[tuple[str, int], ...]:
    return ("needed", device.needed_bytes), ("available", device.limit_bytes)


def _largest(device: DeviceForecast) -> str:
    part = max(device.parts, key=lambda part: part.size_bytes)
    return f"the {part.name} of the {part.owner} take {part.size_bytes / GIB:.1f} GiB"


def _check_longest(plan: MemoryPlan) -> str | None:
    """What to change if one sample as long as the context does not fit; `None` if it fits."""
    short = [device for device in forecast_devices(plan, plan.longest_sample) if device.is_short]
    if not short:
        return None
    device = short[0]
    spare = (device.limit_bytes - device.needed_bytes) // plan.cpu_copies
    fits = largest_batch(plan.shape, plan.setup, plan.trainer(plan.longest_sample).peak_bytes + spare)
    return (
        f"a single sample of {plan.context:,} tokens, the longest that `engine.max_context` allows, needs "
        f"{device.needed_bytes / GIB:.1f} of {device.limit_bytes / GIB:.1f} GiB of {device.where}; samples up to "
        f"{fits:,} tokens fit"
        + ("" if plan.setup.checkpointing != "none" else ", longer ones with `trainer.gradient_checkpointing`")
    )
