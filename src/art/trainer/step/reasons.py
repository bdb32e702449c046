"""Say of each target of a micro-batch whether it was learnt, and if not, why: for the token file of the step.

A target was learnt if the loss has a gradient with respect to its log-prob or to its entropy. That is the same question
for every loss, a user's own included. The rest tells why there is none, in the order in which it counts.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from art.storage.steps.token_file import TokenReason
from art.trainer.gate.gate import Correction
from art.trainer.losses import LossInputs, LossOutput
from art.trainer.step.logprobs import TargetRows


def watch_gradients(inputs: LossInputs) -> None:
    """Keep the gradients that `find_reasons` reads. Call it before the backward pass."""
    for tensor in (inputs.policy_logprobs, inputs.entropy):
        if tensor.requires_grad:
            tensor.retain_grad()


def find_reasons(
    inputs: LossInputs, losses: LossOutput, correction: Correction | None, rows: TargetRows, is_rl: Tensor
) -> NDArray[np.uint8]:
    """Return the `TokenReason` [N] of each target of a micro-batch, after its backward pass.

    Args:
        correction: what the mismatch gate did; `None` without a gate.
        is_rl: [N] targets of component "rl".
    """
    learnt = _has_gradient(inputs.policy_logprobs) | _has_gradient(inputs.entropy)
    bounded = losses.clipped_low | losses.clipped_high
    reasons = torch.full((len(learnt),), int(TokenReason.NO_GRADIENT), dtype=torch.uint8)
    steps: list[tuple[Tensor, TokenReason]] = [
        (learnt, TokenReason.TRAINED),
        (learnt & bounded, TokenReason.CAPPED),
        (~learnt & bounded, TokenReason.CLIPPED),
        (~learnt & is_rl & (inputs.advantages == 0), TokenReason.NO_ADVANTAGE),
    ]
    if correction is not None:
        steps.append((learnt & correction.truncated, TokenReason.TRUNCATED))
    if rows.num_forced:
        forced = torch.ones_like(learnt)
        forced[rows.order.cpu()] = False
        steps.append((forced, TokenReason.FORCED))
    if correction is not None:
        steps.append((correction.factors == 0, TokenReason.MISMATCHED_TOKEN))
        steps.append((correction.masked_rollouts, TokenReason.MISMATCHED_ROLLOUT))
    for chosen, reason in steps:
        reasons[chosen] = int(reason)
    result: NDArray[np.uint8] = reasons.numpy()
    return result


def _has_gradient(values: Tensor) -> Tensor:
    gradient = values.grad if values.requires_grad else None
    return torch.zeros(len(values), dtype=torch.bool) if gradient is None else gradient != 0
