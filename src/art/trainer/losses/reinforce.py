"""REINFORCE with importance weights: the off-policy policy gradient.

    r = pi / anchor
    loss   -stop_gradient(min(r, max_ratio)) * A * log pi

Without `max_ratio` the gradient is unbiased and has the variance of the ratio. With it, this is truncated importance
sampling ("Truncated importance sampling", Ionides 2008, https://doi.org/10.1198/106186008X320456).
"""

from __future__ import annotations

import torch

from art.config import ReinforceConfig
from art.trainer.losses.base import LossInputs, TokenLoss, log_ratio


def reinforce_loss(inputs: LossInputs, config: ReinforceConfig) -> TokenLoss:
    with torch.no_grad():
        ratio = log_ratio(inputs).exp()
        weight = ratio if config.max_ratio is None else ratio.clamp(max=config.max_ratio)
    cut = ratio > weight
    return TokenLoss(-weight * inputs.advantages * inputs.policy_logprobs, torch.zeros_like(cut), cut)
