"""Refuse what cannot fit into memory before any process starts, and say what to change where a forecast is short."""

from __future__ import annotations

import math
from dataclasses import dataclass

from art.config import VllmConfig
from art.errors import ConfigError
from art.memory.engine import memory_share
from art.memory.parts import GIB, Part, total
from art.memory.trainer import forecast_trainer, largest_batch, with_checkpointing
from art.runtime.placement.memory import DeviceForecast, MemoryPlan, forecast_devices

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
