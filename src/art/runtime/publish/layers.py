"""The proof that an engine applies adapters to every kind of layer that is trained, by loud test adapters.

The trainer writes one adapter for each kind of layer (`self_attn.q_proj`, `mlp.up_proj` ...) with large random weights
in these layers alone, and its log-probs of a probe. The engine loads one after the other and scores the same tokens. A
layer that it leaves out, or applies with another scale, leaves a gap as large as the adapter's whole effect. Correct
pairs of 36 layers in bfloat16 leave a gap of at most 0.1 of the effect
(`benchmarks/results/2026-11-23-cpu/handshake.md`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from art.engine import Engine
from art.errors import HandshakeError
from art.runtime.publish.handshake import find_other_base, rms_gap
from art.storage import checkpoints
from art.storage.checkpoints import Probe

logger = logging.getLogger(__name__)

GAP_SHARE = 1 / 3
"""Largest gap between engine and trainer, as a share of the test adapter's effect. An ignored layer leaves 1."""
AUDIBLE = 4.0
"""Least effect of a test adapter, in units of the base model's gap, from which it proves anything."""
SILENT_NATS = 1e-4
"""An effect below this proves nothing either, in any dtype."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """What the probe tells about one kind of layer; root mean squares in nats."""

    kind: str
    effect: float
    """Change of the trainer's log-probs by the test adapter."""
    followed: float
    """Change of the engine's log-probs by it."""
    gap: float
    """Difference of engine and trainer under the test adapter."""
    noise: float
    """Difference of engine and trainer under the base model."""

    @property
    def is_audible(self) -> bool:
        return self.effect >= max(SILENT_NATS, AUDIBLE * self.noise)

    @property
    def is_applied(self) -> bool:
        return self.gap <= GAP_SHARE * self.effect


async def prove_layers(engine: Engine, folder: Path, tolerance: float | None = None) -> None:
    """Prove that `engine` applies each test adapter in `folder`, a folder by kind of layer. All are unloaded again.

    A kind whose test adapter is too quiet for this pair is named in a warning, and not proved.

    Args:
        tolerance: largest allowed difference of one token of the base model; replaces the bound of `handshake.py`.

    Raises:
        AdapterError: the engine refused a test adapter.
        HandshakeError: the engine does not apply adapters to a kind of layer, or the base models differ.
    """
    started = time.perf_counter()
    info = await engine.info()
    quiet: list[str] = []
    kinds = await asyncio.to_thread(lambda: sorted(path.name for path in folder.iterdir()))
    for kind in kinds:
        probe = checkpoints.read_probe(folder / kind).shortened(info.max_context)
        heard, base = await _listen(engine, kind, folder / kind, probe)
        if problem := find_other_base(base, probe, info.dtype, tolerance):
            raise HandshakeError(f"the engine cannot serve what is trained: {problem}")
        if not heard.is_audible:
            quiet.append(kind)
        elif not heard.is_applied:
            raise HandshakeError(_describe(heard))
    took = time.perf_counter() - started
    if quiet:
        logger.warning(
            "not proved that the engine applies adapters to %s: a test adapter there moves log-probs too little on "
            "this model and in %s",
            ", ".join(quiet),
            info.dtype,
        )
    proved = [kind for kind in kinds if kind not in quiet]
    logger.info("the engine applies adapters to %s (proved in %.1f s)", ", ".join(proved) or "no layer", took)


async def _listen(engine: Engine, kind: str, path: Path, probe: Probe) -> tuple[_Heard, list[float]]:
    """Score the probe under a test adapter; also return the engine's log-probs of the base model."""
    name = f"test/{kind}"
    try:
        await engine.load_adapter(name, path)
        base, policy = await asyncio.gather(engine.score(probe.token_ids, None), engine.score(probe.token_ids, name))
    finally:
        await engine.unload_adapter(name)
    heard = _Heard(
        kind=kind,
        effect=rms_gap(probe.logprobs, probe.base_logprobs),
        followed=rms_gap(policy, base),
        gap=rms_gap(policy, probe.logprobs),
        noise=rms_gap(base, probe.base_logprobs),
    )
    return heard, base


def _describe(heard: _Heard) -> str:
    wrong = "does not apply adapters to" if heard.followed < GAP_SHARE * heard.effect else "applies adapters wrongly to"
    return (
        f"the engine {wrong} `{heard.kind}`: a test adapter in these layers alone moves the trainer's log-probs by "
        f"{heard.effect:.3g} nats (root mean square) and the engine's by {heard.followed:.3g}, and then they differ by "
        f"{heard.gap:.3g}. What is trained there would not be served. Leave these layers out by `lora.target_modules`, "
        "or use another engine or another release of it"
    )
