"""Losses of single targets (trained tokens), one file per algorithm. The trainer sums what they return.

A loss is a function from `LossInputs` and its config to `LossOutput`, all [N].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from art.config import CustomLossConfig, EntropyConfig, LossConfig
from art.trainer.losses.base import LossInputs, LossOutput
from art.trainer.losses.cispo import cispo_loss
from art.trainer.losses.custom import custom_loss
from art.trainer.losses.distill import distill_loss
from art.trainer.losses.dpo import dpo_loss
from art.trainer.losses.dppo import dppo_loss
from art.trainer.losses.entropy import entropy_loss
from art.trainer.losses.gspo import gspo_loss
from art.trainer.losses.kl import kl_loss
from art.trainer.losses.ppo import ppo_loss
from art.trainer.losses.reinforce import reinforce_loss
from art.trainer.losses.sft import rejection_loss, sft_loss

__all__ = ["LossInputs", "LossOutput", "reads_entropy_gradient", "sft_loss", "term_loss"]

_LOSSES: Mapping[str, Callable[[LossInputs, Any], LossOutput]] = {
    "dppo": dppo_loss,
    "ppo": ppo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "reinforce": reinforce_loss,
    "dpo": lambda inputs, _: dpo_loss(inputs),
    "sft": lambda inputs, _: rejection_loss(inputs),
    "distill": distill_loss,
    "kl": kl_loss,
    "entropy": lambda inputs, _: entropy_loss(inputs),
    "custom": custom_loss,
}
"""Losses by the `type` of their configuration."""


def term_loss(inputs: LossInputs, term: LossConfig) -> LossOutput:
    """Compute the loss of each target that `term` configures, without the weight of `term`."""
    return _LOSSES[term.type](inputs, term)


def reads_entropy_gradient(terms: Iterable[LossConfig]) -> bool:
    """Return whether any of `terms` is differentiated with respect to `LossInputs.entropy`."""
    return any(
        isinstance(term, EntropyConfig) or (isinstance(term, CustomLossConfig) and term.entropy_gradient)
        for term in terms
    )
