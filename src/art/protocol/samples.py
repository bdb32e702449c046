"""The trainer's input and output as they cross processes. No torch here: the server makes and reads these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from art.errors import InvalidRequestError

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
    """Multiplies every target of the sample in the sum."""
    share: float | None = None
    """What the sample adds to the sum's normaliser; `None`: its weight for every target, which gives a mean."""
    temperature: float = 1.0
    """Sampling temperature; the trainer scales its logits alike."""
    policy_version: int = 0
    """Oldest weights that sampled any token of this sample."""
    component: Component = "rl"
    teacher_logprobs: list[float] | None = None  # [T] for distillation; read where loss_mask is True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Flat, in sections: `loss/...`, `offpolicy/...`, `data/...`, `time/...`."""


def samples_from_wire(items: list[dict[str, Any]]) -> list[TrainingSample]:
    """Read samples out of a frame. Writing them needs no function: frames encode dataclasses.

    Raises:
        InvalidRequestError: a field is missing or unknown.
    """
    try:
        return [TrainingSample(**item) for item in items]
    except TypeError as error:
        raise InvalidRequestError(f"a training sample does not have the expected fields: {error}") from error
