"""REINFORCE with importance weights: the off-policy policy gradient.

    r = pi / anchor
    loss   -stop_gradient(min(r, max_ratio)) * A * log pi

Without `max_ratio` the gradient is unbiased and has the variance of the ratio. With it, this is truncated importance
sampling ("Truncated importance sampling", Ionides 2008, https://doi.org/10.1198/106186008X320456).
"""

from __future__ import annotations

from art.config import ReinforceConfig
from art.trainer.losses.base import LossInputs, LossOutput, weighted_logprobs


def reinforce_loss(inputs: LossInputs, config: ReinforceConfig) -> LossOutput:
    return weighted_logprobs(inputs, inputs.advantages, high=config.max_ratio)
