"""PPO's clipped surrogate. GRPO, Dr.GRPO and DAPO use it with other advantages and normalisation.

    r = pi / anchor
    loss   -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
    dual   for tokens with A < 0, the loss is at most -dual_clip * A

Sources: "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), equation 7; the wider upper bound is that of DAPO
(arXiv 2503.14476); the dual clip is that of "Mastering Complex Control in MOBA Games" (arXiv 1912.09729), equation 5.
"""

from __future__ import annotations

import torch

from art.config import PpoConfig
from art.trainer.losses.base import LossInputs, LossOutput, log_ratio


def ppo_loss(inputs: LossInputs, config: PpoConfig) -> LossOutput:
    ratio, advantages = log_ratio(inputs).exp(), inputs.advantages
    plain = ratio * advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    gain = torch.minimum(plain, clipped)
    is_clipped = (clipped < plain).detach()
    low, high = is_clipped & (advantages < 0), is_clipped & (advantages > 0)
    if config.dual_clip is not None:
        floor = config.dual_clip * advantages
        cut = ((advantages < 0) & (gain < floor)).detach()
        gain, high = torch.where(cut, floor, gain), high | cut
    return LossOutput(-gain, low, high)
