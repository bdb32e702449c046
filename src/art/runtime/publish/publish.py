"""Publish a checkpoint: load its weights into the engine, then prove that it samples from the trained policy.

The trainer stored its log-probs of a fixed token path in the checkpoint (`Probe`). The engine scores the same path with
the weights that it has just loaded (`handshake.py`). Any fault on the way (a stale file, a dropped layer, an adapter
that matches nothing, a scale applied twice) moves these numbers, and the checkpoint is not served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from art.engine import Engine
from art.errors import HandshakeError
from art.runtime.publish.handshake import find_problem, largest_gap, norm_differs, score_probe, worst_gap
from art.storage import checkpoints

logger = logging.getLogger(__name__)


async def publish(
    engine: Engine, adapter_id: str, checkpoint: Path, tolerance: float | None = None
) -> dict[str, float]:
    """Load `checkpoint` as `adapter_id`, prove it, and return the metrics `publish/...` and `time/publish_s`.

    Raises:
        CorruptCheckpointError: a file of the checkpoint differs from its manifest.
        AdapterError: the engine refused the weights.
        HandshakeError: the engine does not reproduce the probe or the norm; the weights are unloaded again.
    """
    started = time.perf_counter()
    await asyncio.to_thread(checkpoints.verify, checkpoint)
    info = await engine.load_adapter(adapter_id, checkpoint)
    about = await engine.info()
    probe = checkpoints.read_probe(checkpoint).shortened(about.max_context)
    scores = await score_probe(engine, adapter_id, probe, one_policy=about.one_policy)
    problem = find_problem(scores, probe, dtype=about.dtype, tolerance=tolerance)
    problem = problem or _find_other_norm(info.norm, checkpoint, about.dtype)
    if problem is not None:
        await engine.unload_adapter(adapter_id)
        raise HandshakeError(
            f"{adapter_id} was not published: {problem}. The engine does not serve what was trained; the previous step "
            "stays in place"
        )
    metrics = {
        "publish/probe_gap": worst_gap(scores.policy, probe.logprobs),
        "publish/probe_effect": largest_gap(probe.base_logprobs, probe.logprobs),
    }
    if scores.base_alone is not None:
        metrics["publish/base_gap"] = largest_gap(scores.base_alone, probe.base_logprobs)
    if info.norm is not None:
        metrics["publish/adapter_norm"] = info.norm
    gap, effect = metrics["publish/probe_gap"], metrics["publish/probe_effect"]
    logger.info("published %s: %d layers, probe gap %.2g nats, moved by %.2g", adapter_id, info.num_layers, gap, effect)
    return metrics | {"time/publish_s": time.perf_counter() - started}


def _find_other_norm(loaded: float | None, checkpoint: Path, dtype: str) -> str | None:
    """Explain why an engine that tells its norm holds other weights, e.g. some whose effect on the probe is noise."""
    trained = checkpoints.read_state(checkpoint).metrics.get("loss/adapter_norm")
    if loaded is None or trained is None or not norm_differs(loaded, trained, dtype):
        return None
    return f"the engine loaded a change of norm {loaded:.6g}, the trainer saved one of {trained:.6g}"
