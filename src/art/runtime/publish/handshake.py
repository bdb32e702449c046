"""The proof that an engine samples from what was trained: it must reproduce the trainer's log-probs of the probe.

    base model alone                          measures the noise between engine and trainer before any training
    policy, base, policy, base in one batch   the policy must agree as well as that, and must not change the base

The first measurement makes the proof sharp. A step at a learning rate of 1e-6 moves log-probs by about 1e-4 nats, which
no bound for all machines could tell from noise. Float32 kernels agree to about 2e-6, so the proof detects weights of
the previous step, a missing layer, or weights without effect. In bfloat16 the noise hides such small steps, and only
the norm and the manifest's hashes protect them.

An engine that holds one policy has no base model beside it, so its noise is unknown. Its policy must agree to
`FLOOR_NATS`, and there are no neighbours that it could change.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from art.engine import Engine
from art.storage.checkpoints import Probe

TOLERANCE_NATS = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest allowed difference of one token, by engine dtype. Float32 kernels of trainer and engine agree to about 1e-5,
and bfloat16 forward passes to about 3e-2."""
FLOOR_NATS = {"float32": 2e-5, "bfloat16": 0.05}
"""Root mean square difference that is always allowed, by engine dtype: about ten times the usual one."""
NOISE_FACTOR = 10.0
"""How many times worse than on the base model the agreement may be, since adapters add matrix products."""
NORM_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest relative difference between the norms of the trained and the loaded weights. In float32 they agree to 1e-7;
bfloat16 rounds them by about 1e-3."""
NUM_COPIES = 2
"""Copies of policy and base in one batch. An engine may take the first request alone, so one copy is not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The engine's log-probs of the probe's tokens: lists of [T - 1]."""

    base_alone: list[float] | None
    """The base model scored by itself; `None` for an engine that holds one policy, and `base` is then empty."""
    policy: list[list[float]]
    """The trained policy, in `NUM_COPIES` requests that share a batch with those of `base`."""
    base: list[list[float]]


async def score_probe(engine: Engine, adapter_id: str, probe: Probe, *, one_policy: bool) -> Scores:
    """Ask the engine for its log-probs of the probe's tokens under the policy and, unless `one_policy`, the base model.

    Both share a batch, because some engines have applied adapters to the wrong requests of a batch.
    """
    if one_policy:
        policy = await asyncio.gather(*(engine.score(probe.token_ids, adapter_id) for _ in range(NUM_COPIES)))
        return Scores(base_alone=None, policy=policy, base=[])
    base_alone = await engine.score(probe.token_ids, None)
    names = [adapter_id, None] * NUM_COPIES
    scores = await asyncio.gather(*(engine.score(probe.token_ids, name) for name in names))
    return Scores(base_alone=base_alone, policy=scores[::2], base=scores[1::2])


def find_problem(scores: Scores, probe: Probe, *, dtype: str, tolerance: float | None) -> str | None:
    """Explain why these scores do not prove that the engine serves the trained policy; `None` if they do.

    Args:
        tolerance: largest allowed difference of one token; replaces all bounds of this module.
    """
    limit = tolerance if tolerance is not None else _of(TOLERANCE_NATS, dtype)
    effect = largest_gap(probe.base_logprobs, probe.logprobs)
    base_alone = scores.base_alone if scores.base_alone is not None else probe.base_logprobs
    base_gap = largest_gap(base_alone, probe.base_logprobs)
    if not base_gap <= limit:  # NaN fails too
        return (
            f"the engine's log-probs of the base model differ from the trainer's by up to {base_gap:.4g} nats, at most "
            f"{limit:.4g} is allowed: the two do not have the same base model, or not the same settings of it"
        )
    gap = worst_gap(scores.policy, probe.logprobs)
    if not gap <= limit:
        return (
            f"the engine's log-probs of the probe differ from the trainer's by up to {gap:.4g} nats, at most "
            f"{limit:.4g} is allowed (training has moved them by {effect:.4g})"
        )
    noise = rms_gap(base_alone, probe.base_logprobs)
    bound = tolerance if tolerance is not None else max(_of(FLOOR_NATS, dtype), NOISE_FACTOR * noise)
    rms = _worst([rms_gap(served, probe.logprobs) for served in scores.policy])
    if not rms <= bound:
        measure = f"at most {bound:.4g} is allowed"
        if scores.base_alone is not None:
            measure = f"while those of the base model agree to {noise:.4g}"
        return (
            f"the engine's log-probs of the probe differ from the trainer's by {rms:.4g} nats (root mean square), "
            f"{measure} (training has moved them by up to {effect:.4g})"
        )
    shift = _worst([rms_gap(served, probe.base_logprobs) for served in scores.base] or [0.0])
    if not shift <= bound:
        return (
            f"requests for the base model change by {shift:.4g} nats (root mean square) when they share a batch with "
            "requests for this adapter: the engine applies adapters to requests that do not ask for them"
        )
    return None


def norm_differs(loaded: float, trained: float, dtype: str) -> bool:
    """Tell whether the norms show that the engine loaded other weights than the trainer saved. NaN differs."""
    return not abs(loaded - trained) <= _of(NORM_TOLERANCE, dtype) * trained


def largest_gap(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest absolute difference: infinite when lengths differ, NaN when any value is NaN."""
    if len(a) != len(b):
        return math.inf
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps, default=0.0)


def worst_gap(copies: Sequence[Sequence[float]], logprobs: Sequence[float]) -> float:
    """Return the largest absolute difference of any copy from `logprobs`; NaN when any value is NaN."""
    return _worst([largest_gap(copy, logprobs) for copy in copies])


def rms_gap(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the root mean square difference of two lists of the same length."""
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / max(len(a), 1))


def _worst(gaps: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


def _of(bounds: dict[str, float], dtype: str) -> float:
    return bounds.get(dtype, max(bounds.values()))
