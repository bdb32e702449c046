"""Publish a checkpoint: load its weights into the engine, then prove that it samples from the trained policy.

The trainer stored its log-probs of a fixed token path in the checkpoint (`Probe`). The engine scores the same path with
the weights that it has just loaded. Any fault on the way (a stale file, a dropped layer, an adapter that matches
nothing, a scale applied twice) moves these numbers, and the checkpoint is not served.

    base model alone                          measures the noise between engine and trainer, where nothing was trained
    policy, base, policy, base in one batch   the policy must agree about as well as that, and must not change the base

The first measurement makes the proof sharp. A step at a learning rate of 1e-6 moves log-probs by about 1e-4 nats, which
no bound for all machines could tell from noise. Float32 kernels agree to about 2e-6, so the proof detects weights of
the previous step, a missing layer, or weights without effect. In bfloat16 the noise grows with the depth of the model
and hides such small steps. So before that, loud test adapters prove that adapters are applied at all (`prove_layers`):
the trainer writes one for each kind of layer (`self_attn.q_proj`, `mlp.up_proj` ...) with large random weights in these
layers alone. A layer that the engine leaves out, or applies with another scale, leaves a gap as large as the adapter's
whole effect. Correct pairs of 36 layers in bfloat16 leave a gap of at most 0.1 of the effect
(`benchmarks/results/2026-11-23-cpu/handshake.md`).

An engine that holds one policy has no base model beside it, so its noise is unknown. Its policy must agree to
`ONE_POLICY_NATS`, and there are no neighbours that it could change.

All gaps are root mean squares over the tokens of the probe, in nats.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from art.engine import Engine
from art.errors import HandshakeError
from art.storage import checkpoints
from art.storage.checkpoints import Probe

logger = logging.getLogger(__name__)

BASE_NATS = {"float32": 2e-4, "bfloat16": 0.2}
"""Largest gap of the base model, by engine dtype. Random models of 36 layers measure 2e-6 in float32 and 0.003
to 0.035 in bfloat16, by the size of their logits, and differ by 0.4 to 1.3 from the same model of another seed
(`benchmarks/results/2026-11-23-cpu/handshake.md`)."""
FLOOR_NATS = {"float32": 2e-5, "bfloat16": 0.05}
"""Gap of a policy that is always allowed, by engine dtype."""
NOISE_FACTOR = {"float32": 10.0, "bfloat16": 4.0}
"""How many times larger than that of the base model the gap of a policy may be. Adapters add matrix products. In
bfloat16 loud test adapters measured 2.1 to 3.1 times its gap where that was not below the floor anyway."""
ONE_POLICY_NATS = {"float32": 2e-5, "bfloat16": 0.2}
"""Largest gap of the policy of an engine that has no base model beside it, by engine dtype."""
NORM_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest relative difference between the norms of the trained and the loaded weights. In float32 they agree to 1e-7;
bfloat16 rounds them by about 1e-3."""
NUM_COPIES = 2
"""Copies of policy and base in one batch. An engine may take the first request alone, so one copy is not enough."""
GAP_SHARE = 1 / 3
"""Largest gap between engine and trainer, as a share of the test adapter's effect. An ignored layer leaves 1."""
AUDIBLE = 4.0
"""Least effect of a test adapter, in units of the base model's gap, from which it proves anything."""
SILENT_NATS = 1e-4
"""An effect below this proves nothing either, in any dtype."""


async def publish(engine: Engine, adapter_id: str, checkpoint: Path) -> dict[str, float]:
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
    problem = find_problem(scores, probe, dtype=about.dtype)
    # An engine that tells its norm may hold other weights whose effect on the probe is noise.
    trained = checkpoints.read_state(checkpoint).metrics.get("loss/adapter_norm")
    if problem is None and info.norm is not None and trained is not None:
        agrees = abs(info.norm - trained) <= _of(NORM_TOLERANCE, about.dtype) * trained  # NaN does not
        other = f"the engine loaded a change of norm {info.norm:.6g}, the trainer saved one of {trained:.6g}"
        problem = None if agrees else other
    if problem is not None:
        await engine.unload_adapter(adapter_id)
        raise HandshakeError(
            f"{adapter_id} was not published: {problem}. The engine does not serve what was trained; the previous step "
            "stays in place"
        )
    gap = _worst([largest_gap(copy, probe.logprobs) for copy in scores.policy])
    effect = largest_gap(probe.base_logprobs, probe.logprobs)
    metrics = {"publish/probe_gap": gap, "publish/probe_effect": effect}
    if scores.base_alone is not None:
        metrics["publish/base_gap"] = largest_gap(scores.base_alone, probe.base_logprobs)
    if info.norm is not None:
        metrics["publish/adapter_norm"] = info.norm
    logger.info("published %s: %d layers, probe gap %.2g nats, moved by %.2g", adapter_id, info.num_layers, gap, effect)
    return metrics | {"time/publish_s": time.perf_counter() - started}


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


def find_problem(scores: Scores, probe: Probe, *, dtype: str) -> str | None:
    """Explain why these scores do not prove that the engine serves the trained policy; `None` if they do."""
    gap = _worst([rms_gap(served, probe.logprobs) for served in scores.policy])
    if scores.base_alone is None:
        bound = _of(ONE_POLICY_NATS, dtype)
        measure = f"at most {bound:.4g} is allowed"
    elif problem := find_other_base(scores.base_alone, probe, dtype):
        return problem
    else:
        noise = rms_gap(scores.base_alone, probe.base_logprobs)
        bound = max(_of(FLOOR_NATS, dtype), _of(NOISE_FACTOR, dtype) * noise)
        measure = f"while those of the base model agree to {noise:.4g}, so at most {bound:.4g} is allowed"
    if not gap <= bound:  # NaN fails too
        moved = rms_gap(probe.base_logprobs, probe.logprobs)
        return (
            f"the engine's log-probs of the probe differ from the trainer's by {gap:.4g} nats (root mean square), "
            f"{measure} (training has moved them by {moved:.4g})"
        )
    shift = _worst([rms_gap(served, probe.base_logprobs) for served in scores.base] or [0.0])
    if shift <= bound:
        return None
    return (
        f"requests for the base model change by {shift:.4g} nats when they share a batch with requests for this "
        "adapter: the engine applies adapters to requests that do not ask for them"
    )


def find_other_base(base_alone: Sequence[float], probe: Probe, dtype: str) -> str | None:
    """Explain why engine and trainer cannot have the same base model; `None` if they may have."""
    gap, bound = rms_gap(base_alone, probe.base_logprobs), _of(BASE_NATS, dtype)
    if gap <= bound:
        return None
    return (
        f"the engine's log-probs of the base model differ from the trainer's by {gap:.4g} nats, at most {bound:.4g} is "
        "allowed: the two do not have the same base model, or not the same settings of it"
    )


async def prove_layers(engine: Engine, folder: Path) -> None:
    """Prove that `engine` applies each test adapter in `folder`, a folder by kind of layer. All are unloaded again.

    A kind whose test adapter is too quiet for this pair is named in a warning, and not proved.

    Raises:
        AdapterError: the engine refused a test adapter.
        HandshakeError: the engine does not apply adapters to a kind of layer, or the base models differ.
    """
    started = time.perf_counter()
    info = await engine.info()
    proved, quiet = [], []
    for kind in await asyncio.to_thread(lambda: sorted(path.name for path in folder.iterdir())):
        probe = checkpoints.read_probe(folder / kind).shortened(info.max_context)
        name = f"test/{kind}"
        try:
            await engine.load_adapter(name, folder / kind)
            base, policy = await asyncio.gather(
                engine.score(probe.token_ids, None), engine.score(probe.token_ids, name)
            )
        finally:
            await engine.unload_adapter(name)
        if problem := find_other_base(base, probe, info.dtype):
            raise HandshakeError(f"the engine cannot serve what is trained: {problem}")
        # What the test adapter changes in the trainer, in the engine, and how far they are apart with and without it.
        effect, followed = rms_gap(probe.logprobs, probe.base_logprobs), rms_gap(policy, base)
        gap, noise = rms_gap(policy, probe.logprobs), rms_gap(base, probe.base_logprobs)
        if not effect >= max(SILENT_NATS, AUDIBLE * noise):
            quiet.append(kind)
        elif gap <= GAP_SHARE * effect:
            proved.append(kind)
        else:
            wrong = "does not apply adapters to" if followed < GAP_SHARE * effect else "applies adapters wrongly to"
            raise HandshakeError(
                f"the engine {wrong} `{kind}`: a test adapter in these layers alone moves the trainer's log-probs by "
                f"{effect:.3g} nats (root mean square) and the engine's by {followed:.3g}, and then they differ by "
                f"{gap:.3g}. What is trained there would not be served. Leave these layers out by "
                "`lora.target_modules`, or use another engine or another release of it"
            )
    if quiet:
        logger.warning(
            "not proved that the engine applies adapters to %s: a test adapter there moves log-probs too little on "
            "this model and in %s", ", ".join(quiet), info.dtype,
        )  # fmt: skip
    took_s = time.perf_counter() - started
    logger.info("the engine applies adapters to %s (proved in %.1f s)", ", ".join(proved) or "no layer", took_s)


def largest_gap(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest absolute difference: infinite when lengths differ, NaN when any value is NaN."""
    if len(a) != len(b):
        return math.inf
    return _worst([abs(x - y) for x, y in zip(a, b, strict=True)])


def rms_gap(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the root mean square difference: infinite when lengths differ, NaN when any value is NaN."""
    if len(a) != len(b):
        return math.inf
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / max(len(a), 1))


def _worst(gaps: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, gaps)) else max(gaps, default=0.0)


def _of(bounds: dict[str, float], dtype: str) -> float:
    return bounds.get(dtype, bounds["bfloat16"])
