"""Losses of single targets, one file per algorithm. The trainer sums what they return.

A loss is a function from `LossInputs` and its config to `TokenLoss`, all [N].
"""

from __future__ import annotations

from art.config import (
    CispoConfig,
    DistillConfig,
    DpoConfig,
    DppoConfig,
    GspoConfig,
    KlConfig,
    LossConfig,
    PpoConfig,
    ReinforceConfig,
    SftConfig,
)
from art.trainer.losses.base import LossInputs, TokenLoss
from art.trainer.losses.cispo import cispo_loss
from art.trainer.losses.distill import distill_loss
from art.trainer.losses.dpo import dpo_loss
from art.trainer.losses.dppo import dppo_loss
from art.trainer.losses.gspo import gspo_loss
from art.trainer.losses.kl import kl_loss
from art.trainer.losses.ppo import ppo_loss
from art.trainer.losses.reinforce import reinforce_loss
from art.trainer.losses.sft import rejection_loss, sft_loss

__all__ = ["LossInputs", "TokenLoss", "sft_loss", "term_loss"]


def term_loss(inputs: LossInputs, term: LossConfig) -> TokenLoss:
    """Compute the loss that `term` configures, without its weight."""
    match term:
        case DppoConfig():
            return dppo_loss(inputs, term)
        case PpoConfig():
            return ppo_loss(inputs, term)
        case GspoConfig():
            return gspo_loss(inputs, term)
        case CispoConfig():
            return cispo_loss(inputs, term)
        case ReinforceConfig():
            return reinforce_loss(inputs, term)
        case DpoConfig():
            return dpo_loss(inputs)
        case SftConfig():
            return rejection_loss(inputs)
        case DistillConfig():
            return distill_loss(inputs, term)
        case KlConfig():
            return kl_loss(inputs, term)
