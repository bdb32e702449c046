"""CISPO: clipped importance weights as constants, gradient through the log-prob of every token.

    r = pi / anchor
    loss   -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) * A * log pi

Source: "MiniMax-M1" (arXiv 2506.13585); `clip_high=4`, a cap of 5 on the ratio, follows ScaleRL (arXiv 2510.13786).
"""

from __future__ import annotations

from art.config import CispoConfig
from art.trainer.losses.base import LossInputs, LossOutput, weighted_logprobs


def cispo_loss(inputs: LossInputs, config: CispoConfig) -> LossOutput:
    return weighted_logprobs(inputs, inputs.advantages, low=1 - config.clip_low, high=1 + config.clip_high)
