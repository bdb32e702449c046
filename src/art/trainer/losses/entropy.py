"""Entropy bonus: the loss falls as the policy's entropy rises, which keeps it exploring.

    S    = -sum_v p_v log p_v            over the tokens that could be drawn, at the sampling temperature
    loss   -S

The gradient is that of S itself, over the whole distribution, not an estimate from the sampled token.

Source: "Asynchronous Methods for Deep Reinforcement Learning" (arXiv 1602.01783), section 4; its factor is `weight`.
"""

from __future__ import annotations

from art.trainer.losses.base import LossInputs, LossOutput, unclipped


def entropy_loss(inputs: LossInputs) -> LossOutput:
    return unclipped(-inputs.entropy)
