"""Cross-entropy: the negative log-prob of each target."""

from __future__ import annotations

import torch
from torch import Tensor

from art.trainer.losses.base import TokenLoss


def sft_loss(policy_logprobs: Tensor) -> TokenLoss:
    """[N] to [N]."""
    return TokenLoss(-policy_logprobs, torch.zeros_like(policy_logprobs, dtype=torch.bool))
