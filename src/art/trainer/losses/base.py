"""What every loss is given and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """N targets of S samples, every sample complete. All tensors are [N] but for `num_samples`."""

    policy_logprobs: Tensor  # differentiable
    anchor_logprobs: Tensor  # what importance ratios compare with: the sampler, or the policy at the step's start
    sampling_logprobs: Tensor
    advantages: Tensor
    samples: Tensor  # index of the target's sample
    num_samples: int
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """Further log-probs of the targets by name: references and the teacher, see `art.trainer.streams`."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    values: Tensor  # [N] loss of each target, differentiable in its policy log-prob
    clipped_low: Tensor  # [N] booleans: dropped or cut because the policy gives it less probability than the anchor
    clipped_high: Tensor  # [N] the same for more

    @property
    def masked(self) -> Tensor:
        return self.clipped_low | self.clipped_high


def unclipped(values: Tensor) -> TokenLoss:
    """A loss that cuts nothing."""
    none = torch.zeros_like(values, dtype=torch.bool)
    return TokenLoss(values, none, none)


def log_ratio(inputs: LossInputs, limit: float = 20.0) -> Tensor:
    """log(policy / anchor), clamped so that neither its exponential nor that one's gradient overflows.

    Beyond exp(20) = 5e8 the ratio of a token says that something broke, not what to learn: it has no gradient there.
    """
    return (inputs.policy_logprobs - inputs.anchor_logprobs).clamp(-limit, limit)
