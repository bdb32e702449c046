"""Check by a forecast that engine and trainer fit into memory, before a step is tried."""

from __future__ import annotations

from art.memory.parts import GIB
from art.memory.trainer import largest_batch
from art.protocol.preflight import CheckResult, CheckStatus, MemoryPart
from art.runtime.placement.memory import DeviceForecast, MemoryPlan, forecast_devices
from art.runtime.placement.shortage import advise

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
