"""CISPO: clipped importance weights as constants, gradient through the log-prob of every token.

    r = pi / mu
    loss   -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) * A * log pi

Source: "MiniMax-M1" (arXiv 2506.13585); `clip_high=4`, a cap of 5 on the ratio, follows ScaleRL (arXiv 2510.13786).
"""

from __future__ import annotations

import torch
from torch import Tensor

from art.config import CispoConfig
from art.trainer.losses.base import TokenLoss


def cispo_loss(
    policy_logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, config: CispoConfig
) -> TokenLoss:
    """All arguments and results are [N]. `masked` says where the weight was clipped; those tokens still learn."""
    with torch.no_grad():
        ratio = (policy_logprobs - sampling_logprobs).exp()
        weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(-weight * advantages * policy_logprobs, weight != ratio)
