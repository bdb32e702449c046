"""Cross-entropy: the negative log-prob of each target.

As a term of a reinforcement-learning step, it trains only targets with positive advantage (rejection fine-tuning).
"""

from __future__ import annotations

import torch
from torch import Tensor

from art.trainer.losses.base import LossInputs, LossOutput, unclipped


def sft_loss(policy_logprobs: Tensor) -> LossOutput:
    """Compute the cross-entropy [N] of targets with log-probs `policy_logprobs` [N]."""
    return unclipped(-policy_logprobs)


def rejection_loss(inputs: LossInputs) -> LossOutput:
    """Compute the cross-entropy of targets with positive advantage; the others have a loss of 0."""
    return unclipped(torch.where(inputs.advantages > 0, -inputs.policy_logprobs, 0.0))
