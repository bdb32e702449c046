"""GSPO: PPO's surrogate on one ratio per sample, the geometric mean over its tokens.

    s   = exp(mean over the sample's targets of log(pi / anchor))
    s_t = stop_gradient(s) * pi / stop_gradient(pi)                     value of s, gradient of the token
    loss   -min(s_t * A, clip(s_t, 1 - clip_low, 1 + clip_high) * A)    of every target

This is the paper's GSPO-token. If all tokens of a sample have one advantage, loss and gradient equal those of GSPO. If
turns or tokens have advantages of their own, each learns from its own. Clipping drops a whole sample, so the bounds are
orders of magnitude tighter than PPO's. With `normalize="rollout"` a sample's targets sum to the paper's loss.

Source: "Group Sequence Policy Optimization" (arXiv 2507.18071), equations 5, 13 and 14; the bounds are those of its
section 5.1.
"""

from __future__ import annotations

import torch

from art.config import GspoConfig
from art.trainer.losses.base import LossInputs, LossOutput, log_ratio, mean_per_sample


def gspo_loss(inputs: LossInputs, config: GspoConfig) -> LossOutput:
    policy, advantages = inputs.policy_logprobs, inputs.advantages
    with torch.no_grad():
        of_sample = mean_per_sample(inputs, log_ratio(inputs)).exp()[inputs.samples]
    ratio = of_sample * (policy - policy.detach()).exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    is_clipped = (clipped < plain).detach()
    return LossOutput(-torch.minimum(plain, clipped), is_clipped & (advantages < 0), is_clipped & (advantages > 0))
