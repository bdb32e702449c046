"""How much the log-probs of two correct implementations of one policy differ, by number type.

The unit is nats per token, root mean square. Where that is s, the mean log-ratio of sampled tokens is about -s^2 / 2,
because minus the mean is the KL divergence of the two distributions.

    float32     1e-6 between trainer and embedded engine; with TF32 matrix products about 1e-3
    bfloat16    0.032 for layers of a 4B model; a KL of 0.001, which is usual for vLLM, is 0.045
    mixtures    a KL of 0.0015 for Qwen3-30B-A3B in bfloat16, with single tokens that differ by whole nats, where
                engine and trainer choose experts independently (prime-rl, pull request 2808; arXiv 2510.11370)

In float32 these differ by a factor of 1,000, so the handshake decides: how well the engine reproduced the probe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from art.protocol.calls import QUANTIZED

_BOUNDS = {"float32": (0.005, 0.02), "bfloat16": (0.05, 0.1), QUANTIZED: (0.1, 0.2)}
"""Usual and largest noise by number type, the finest type first."""
_LEAST = 1e-4
"""Usual noise in float32 where the handshake measured less: 20 times the largest difference of one token that 25,000
tokens of five model families showed at temperature 1."""
_OVER_PROBE = 10.0
"""Usual noise in float32 over what the handshake measured: a probe is short, and adapters and prompts differ."""
_MIXTURE = 2.0
"""Factor for a mixture of experts: rounding changes which experts compute a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Noise of log-ratios that rounding explains, in nats per token (root mean square)."""

    trainer: str = "float32"
    engine: str = "float32"
    is_mixture: bool = False
    probe_gap: float | None = None
    """Largest difference, in nats, that the handshake measured between the two; `None` if it is unknown."""

    @property
    def usual(self) -> float:
        """Noise that is always allowed for."""
        return self._bounds()[0]

    @property
    def most(self) -> float:
        """Largest noise that rounding explains. What a step shows beyond it widens no bound."""
        return self._bounds()[1]

    def _bounds(self) -> tuple[float, float]:
        factor = _MIXTURE if self.is_mixture else 1.0
        usual, most = max(_BOUNDS.get(name, _BOUNDS["bfloat16"]) for name in (self.trainer, self.engine))
        if self.probe_gap is not None and (usual, most) == _BOUNDS["float32"] and not self.is_mixture:
            learnt = min(usual, max(_LEAST, _OVER_PROBE * self.probe_gap))
            usual, most = learnt, learnt * most / usual
        return factor * usual, factor * most

    def __str__(self) -> str:
        kinds = f"trainer in {self.trainer}, engine in {self.engine}"
        return f"{kinds}, mixture of experts" if self.is_mixture else kinds


def expected_noise(model: Any, trainer_dtype: str, engine_dtype: str | None, probe_gap: float | None = None) -> Noise:
    """Describe the noise between the trainer's `model` and an engine. An unknown engine has the trainer's type."""
    mixture = is_mixture(model.config)
    return Noise(trainer=trainer_dtype, engine=engine_dtype or trainer_dtype, is_mixture=mixture, probe_gap=probe_gap)


def is_mixture(config: Any) -> bool:
    """Whether a transformers config describes a mixture of experts."""
    text = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)
