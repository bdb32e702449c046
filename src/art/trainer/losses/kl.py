"""KL(policy || reference), estimated on the sampled tokens.

    d = log pi - log ref
    k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d              (Schulman, joschu.net/blog/kl-approx.html)
    loss   r * k1,   stop_gradient(r) * k2,   r * k3           with r = min(pi / anchor, 5)

The tokens come from the anchor, so the ratio makes each the KL of the *trained* policy; and it is what gives k1 and k3
the gradient of the KL at all: without it k1's is zero on average and k3's points along the forward KL ("On a few
pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477). k2's own gradient is right as it is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from art.config import KlConfig
from art.trainer.losses.base import LossInputs, TokenLoss, log_ratio
from art.trainer.streams import reference_name

_MAX_RATIO = 5.0
_LIMIT = 20.0
"""Of |d|: exp(20) nats apart, the reference is no reference any more, and the estimate stays finite."""


def kl_loss(inputs: LossInputs, config: KlConfig) -> TokenLoss:
    reference = inputs.streams[reference_name(config.reference)]
    logs = log_ratio(inputs)
    ratio = logs.clamp(max=math.log(_MAX_RATIO)).exp()
    if config.estimator == "k2":
        ratio = ratio.detach()
    values = ratio * kl_estimate(inputs.policy_logprobs - reference, config.estimator)
    cut = (logs > math.log(_MAX_RATIO)).detach()
    return TokenLoss(values, torch.zeros_like(cut), cut)


def kl_estimate(difference: Tensor, estimator: str) -> Tensor:
    """Of KL(policy || reference) at tokens of the policy, from log policy - log reference [N]."""
    difference = difference.clamp(-_LIMIT, _LIMIT)
    match estimator:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case _:
            return torch.expm1(-difference) + difference
