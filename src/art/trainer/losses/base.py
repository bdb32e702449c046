"""Input and output of every loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """N targets of S whole samples. All tensors are [N]."""

    policy_logprobs: Tensor  # differentiable
    anchor_logprobs: Tensor  # denominator of importance ratios: the sampler, or the policy at the step's start
    sampling_logprobs: Tensor
    advantages: Tensor
    samples: Tensor  # index of the target's sample
    num_samples: int
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """More log-probs [N] of the targets, by name: references and the teacher. See `art.trainer.streams`."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    values: Tensor  # [N] loss of each target, differentiable in its policy log-prob
    clipped_low: Tensor  # [N] booleans: dropped or clipped because the policy gives less probability than the anchor
    clipped_high: Tensor  # [N] booleans: dropped or clipped because it gives more


def unclipped(values: Tensor) -> TokenLoss:
    """A loss that drops and clips no target."""
    none = torch.zeros_like(values, dtype=torch.bool)
    return TokenLoss(values, none, none)


def weighted_logprobs(inputs: LossInputs, advantages: Tensor, *, low: float = 0.0, high: float | None) -> TokenLoss:
    """-stop_gradient(clip(r, low, high)) * A * log pi, with r = pi / anchor; `None` is no upper bound.

    `clipped_low` and `clipped_high` mark where the weight was clipped. Those tokens are still trained.
    """
    with torch.no_grad():
        ratio = log_ratio(inputs).exp()
        weight = ratio.clamp(low, high)
    return TokenLoss(-weight * advantages * inputs.policy_logprobs, ratio < weight, ratio > weight)


def log_ratio(inputs: LossInputs, limit: float = 20.0) -> Tensor:
    """log(policy / anchor) [N], clamped to +-`limit` so that neither its exponential nor the gradient overflows.

    A ratio above exp(20) = 5e8 means that something broke. It has no gradient.
    """
    return (inputs.policy_logprobs - inputs.anchor_logprobs).clamp(-limit, limit)
