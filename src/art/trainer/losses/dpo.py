"""Direct preference optimisation over pairs of rollouts.

    h(rollout) = sum over its tokens of log pi - log reference
    m = beta * (h(chosen) - h(rejected))
    loss of a pair   -(1 - e) log sigmoid(m) - e log sigmoid(-m)               e: label smoothing

The loss of a pair depends on all tokens of both rollouts, which may lie in different micro-batches. But its gradient is
one coefficient per rollout, times the sum of the gradients of that rollout's log-probs. So the log-probs are computed
first (one forward pass), the coefficients follow in closed form, and a plain weighted sum is trained. Its gradient is
exact for any packing.

Sources: "Direct Preference Optimization" (arXiv 2305.18290), equation 7; label smoothing: "A note on DPO with noisy
preferences" (https://ericmitchell.ai/cdpo.pdf).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from art.config import DpoConfig
from art.trainer.losses.base import LossInputs, LossOutput, unclipped


@dataclass(frozen=True, slots=True)
class Preferences:
    """DPO loss and statistics of preference pairs, each of a chosen (better) and a rejected rollout."""

    loss: float
    """Mean loss of the pairs."""
    accuracy: float
    """Share of pairs in which the policy prefers the chosen rollout, i.e. the margin is positive."""
    margin: float
    """Mean of beta * (h(chosen) - h(rejected)) over the pairs; h is a rollout's sum of log pi - log reference."""
    coefficients: dict[str, float]
    """Derivative of the loss with respect to each rollout's summed log-prob, by rollout id."""


def judge_preferences(gains: Mapping[str, float], pairs: Sequence[tuple[str, str]], config: DpoConfig) -> Preferences:
    """Compute the DPO loss of `pairs` (at least one) of (chosen, rejected) rollout ids.

    `gains` is by rollout id the sum of log pi - log reference over the rollout's tokens.
    """
    names = {name: i for i, name in enumerate(gains)}
    h = torch.tensor(list(gains.values()), dtype=torch.float64, requires_grad=True)
    chosen, rejected = (torch.tensor([names[pair[side]] for pair in pairs]) for side in (0, 1))
    margin = config.beta * (h[chosen] - h[rejected])
    smoothing = config.label_smoothing
    loss = (-(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)).mean()
    (gradient,) = torch.autograd.grad(loss, h)
    return Preferences(
        loss=float(loss.detach()),
        accuracy=float((margin > 0).double().mean()),
        margin=float(margin.detach().mean()),
        coefficients=dict(zip(gains, gradient.tolist(), strict=True)),
    )


def dpo_loss(inputs: LossInputs) -> LossOutput:
    """Compute a loss that is linear in the log-probs and has the gradient of the DPO loss.

    The advantage of each target must be minus the coefficient of its rollout (see `judge_preferences`).
    """
    return unclipped(-inputs.advantages * inputs.policy_logprobs)
