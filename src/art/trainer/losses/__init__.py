"""Losses of single targets. One file per algorithm; the trainer only sums what they return.

A reinforcement-learning loss is a function of (policy_logprobs, sampling_logprobs, advantages, its config), all [N].
"""

from __future__ import annotations

from torch import Tensor

from art.config import CispoConfig, DppoConfig, LossConfig, PpoConfig
from art.trainer.losses.base import TokenLoss
from art.trainer.losses.cispo import cispo_loss
from art.trainer.losses.dppo import dppo_loss
from art.trainer.losses.ppo import ppo_loss
from art.trainer.losses.sft import sft_loss

__all__ = ["TokenLoss", "cispo_loss", "dppo_loss", "ppo_loss", "rl_loss", "sft_loss"]


def rl_loss(policy_logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    """The loss that `config` names."""
    match config:
        case DppoConfig():
            return dppo_loss(policy_logprobs, sampling_logprobs, advantages, config)
        case PpoConfig():
            return ppo_loss(policy_logprobs, sampling_logprobs, advantages, config)
        case CispoConfig():
            return cispo_loss(policy_logprobs, sampling_logprobs, advantages, config)
