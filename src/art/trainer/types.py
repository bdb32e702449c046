"""What the trainer is fed and what it gives back. No torch here: the runtime makes these without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Component = Literal["rl", "sft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One root-to-leaf token path of a trajectory.

    Example: prompt P (3 tokens), answer A (2), tool reply E (1), answer B (2)
        token_ids          P P P A A E B B
        loss_mask          0 0 0 1 1 0 1 1
        sampling_logprobs  0 0 0 a a 0 b b
        advantages         0 0 0 v v 0 v v
    """

    sample_id: str
    """Unique within a step; for reports."""
    rollout_id: str
    """Samples of one rollout (its branches) share this."""
    token_ids: list[int]  # [T]
    loss_mask: list[bool]  # [T] True where the policy sampled the token (or where SFT wants it learnt)
    sampling_logprobs: list[float]  # [T] 0.0 where loss_mask is False
    advantages: list[float]  # [T] 0.0 where loss_mask is False; ignored by component "sft"
    weight: float = 1.0
    """Multiplies every token of the sample in the sum and in the normaliser."""
    temperature: float = 1.0
    """Sampling temperature; the trainer scales its logits alike."""
    policy_version: int = 0
    """Oldest weights that sampled any token of this sample."""
    component: Component = "rl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Log-probs that the trainer measured on a fixed token path right after a step, for the publish handshake."""

    token_ids: list[int]  # [T]
    logprobs: list[float]  # [T - 1] of token_ids[1:] with the adapter
    base_logprobs: list[float]  # [T - 1] with the adapter off


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Flat, in sections: `loss/...`, `offpolicy/...`, `data/...`, `time/...`."""
