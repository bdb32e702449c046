"""DPPO, the default loss: importance-weighted policy gradient with the binary total-variation mask.

    r = pi / mu,  d = pi - mu        pi: the policy's probability of the token, mu: the anchor's
    dropped      A > 0 and d > mask_high,   or   A < 0 and d < -mask_low
    loss         -A * min(r, max_ratio) + log_ratio_penalty * (log r)^2       for tokens that are not dropped

The mask bounds how far a *probability* moves. So a rare token may multiply its probability without being dropped, and a
likely token cannot move far. A token with advantage 0 is not trained, so it adds no penalty either.

Source: "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879), the binary approximation of the
total variation; penalty and mask values are prime-rl's; the upper clamp of the ratio is our addition, for safety.
"""

from __future__ import annotations

import math

import torch

from art.config import DppoConfig
from art.trainer.losses.base import LossInputs, LossOutput


def dppo_loss(inputs: LossInputs, config: DppoConfig) -> LossOutput:
    policy, anchor, advantages = inputs.policy_logprobs, inputs.anchor_logprobs, inputs.advantages
    log_ratio = policy - anchor
    limit = math.log(config.max_ratio)
    with torch.no_grad():
        moved = policy.exp() - anchor.exp()
        low = (advantages < 0) & (moved < -config.mask_low)
        high = (advantages > 0) & (moved > config.mask_high)
        trained = ~(low | high) & (advantages != 0)
        capped = log_ratio > limit
    ratio = log_ratio.clamp(max=limit).exp()  # clamped before exp, which could overflow
    values = -advantages * ratio + config.log_ratio_penalty * log_ratio.square()
    return LossOutput(torch.where(trained, values, 0.0), low, high | (trained & capped))
