"""GSPO: PPO's surrogate on one ratio per sample, the geometric mean over its tokens.

    s = exp(mean over the sample's targets of log(pi / anchor))
    loss   -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)      of every target of the sample

A clip cuts a whole sample off, so the bounds are orders of magnitude tighter than PPO's. With `normalize="rollout"` a
sample's targets sum to the paper's loss of the sequence.

Source: "Group Sequence Policy Optimization" (arXiv 2507.18071), equation 5; the bounds are those of its section 5.1.
"""

from __future__ import annotations

import torch

from art.config import GspoConfig
from art.trainer.losses.base import LossInputs, TokenLoss, log_ratio


def gspo_loss(inputs: LossInputs, config: GspoConfig) -> TokenLoss:
    logs, advantages = log_ratio(inputs), inputs.advantages
    zeros = logs.new_zeros(inputs.num_samples)
    counts = zeros.index_add(0, inputs.samples, torch.ones_like(logs))
    mean = zeros.index_add(0, inputs.samples, logs) / counts.clamp(min=1)
    ratio = mean.exp()[inputs.samples]
    plain = ratio * advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    is_clipped = (clipped < plain).detach()
    return TokenLoss(-torch.minimum(plain, clipped), is_clipped & (advantages < 0), is_clipped & (advantages > 0))
