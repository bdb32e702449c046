"""From checkpoint to served policy: load the adapter, then prove that the engine samples from what was trained.

The trainer left its log-probs of a fixed token path in the checkpoint (`Probe`). The engine scores the same path with
the adapter it has just loaded. Anything wrong on the way - a stale file, a dropped layer, an adapter that matches
nothing, a scale applied twice - moves these numbers, and the checkpoint is then not served.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from pathlib import Path

from art.engine import Engine
from art.errors import HandshakeError
from art.storage import checkpoints

logger = logging.getLogger(__name__)

TOLERANCE_NATS = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest probe difference by engine dtype. Float32 kernels of trainer and engine agree to about 1e-5; a bfloat16
forward pass is good to about 3e-2 per token."""


NORM_TOLERANCE = 1e-2
"""Largest relative difference between the adapter's norm as trained and as loaded; bfloat16 rounds it by about 1e-3."""


async def publish(
    engine: Engine, adapter_id: str, checkpoint: Path, tolerance: float | None = None
) -> dict[str, float]:
    """Load `checkpoint` as `adapter_id` and prove it; returns `publish/...` and `time/publish_s` metrics.

    Raises:
        CorruptCheckpointError: a file of the checkpoint differs from its manifest.
        AdapterError: the engine refused the adapter.
        HandshakeError: the engine does not reproduce the probe or the norm; the adapter is unloaded again.
    """
    started = time.perf_counter()
    await asyncio.to_thread(checkpoints.verify, checkpoint)
    info = await engine.load_adapter(adapter_id, checkpoint)
    probe = checkpoints.read_probe(checkpoint)
    if tolerance is None:
        tolerance = TOLERANCE_NATS.get((await engine.info()).dtype, max(TOLERANCE_NATS.values()))
    served = await engine.score(probe.token_ids, adapter_id)
    gap = largest_gap(served, probe.logprobs)
    effect = largest_gap(probe.base_logprobs, probe.logprobs)
    trained_norm = checkpoints.read_state(checkpoint).metrics.get("loss/adapter_norm", info.norm)
    problem = None
    if not gap <= tolerance:  # NaN fails too
        problem = (
            f"the engine's log-probs of the probe differ from the trainer's by up to {gap:.4g} nats, at most "
            f"{tolerance:.4g} is allowed (the adapter itself moves them by {effect:.4g})"
        )
    elif not abs(info.norm - trained_norm) <= NORM_TOLERANCE * trained_norm:
        # Catches what a probe cannot show: an adapter whose effect on the probe is below the tolerance.
        problem = f"the engine loaded an adapter of norm {info.norm:.6g}, the trainer saved one of {trained_norm:.6g}"
    if problem is not None:
        await engine.unload_adapter(adapter_id)
        raise HandshakeError(
            f"{adapter_id} was not published: {problem}. The engine does not serve what was trained; the previous step "
            "stays in place"
        )
    logger.info(
        "published %s: %d layers, probe gap %.2g nats, adapter effect %.2g", adapter_id, info.num_layers, gap, effect
    )
    return {
        "publish/probe_gap": gap,
        "publish/probe_effect": effect,
        "publish/adapter_norm": info.norm,
        "time/publish_s": time.perf_counter() - started,
    }


def largest_gap(a: list[float], b: list[float]) -> float:
    """Largest absolute difference; infinite when lengths differ, NaN when any value is."""
    if len(a) != len(b):
        return math.inf
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps, default=0.0)
