"""PPO's clipped surrogate, with the sampler as the old policy.

    r = pi / mu
    loss   -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

Source: "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), equation 7; the wider upper bound is that of DAPO
(arXiv 2503.14476).
"""

from __future__ import annotations

import torch
from torch import Tensor

from art.config import PpoConfig
from art.trainer.losses.base import TokenLoss

_LOG_RATIO_LIMIT = 20.0
"""exp(20) is far outside any clip range; the clamp only keeps exp from overflowing."""


def ppo_loss(policy_logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, config: PpoConfig) -> TokenLoss:
    """All arguments and results are [N]."""
    ratio = (policy_logprobs - sampling_logprobs).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return TokenLoss(-torch.minimum(plain, clipped), (clipped < plain).detach())
