"""Input and output of every loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Input of a loss: N targets (trained tokens) of S whole samples. All tensors are [N]."""

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
    """Return the loss `values` [N] of targets of which none is dropped or clipped."""
    none = torch.zeros_like(values, dtype=torch.bool)
    return TokenLoss(values, none, none)


def weighted_logprobs(inputs: LossInputs, advantages: Tensor, *, low: float = 0.0, high: float | None) -> TokenLoss:
    """Compute -stop_gradient(clip(r, low, high)) * A * log pi, with A = `advantages` and r = pi / anchor.

    pi is the policy's probability and anchor that of the sampler, or of the policy at the step's start.

    `clipped_low` and `clipped_high` mark where the weight was clipped. Those tokens are still trained.
    """
    with torch.no_grad():
        ratio = log_ratio(inputs).exp()
        weight = ratio.clamp(low, high)
    return TokenLoss(-weight * advantages * inputs.policy_logprobs, ratio < weight, ratio > weight)


def log_ratio(inputs: LossInputs, limit: float = 20.0) -> Tensor:
    """Compute the log importance ratio, log(policy / anchor) [N], clamped to +-`limit` to avoid overflow.

    A ratio above exp(20) = 5e8 means that something broke. It has no gradient.
    """
    return (inputs.policy_logprobs - inputs.anchor_logprobs).clamp(-limit, limit)
