"""KL(policy || reference), estimated on the sampled tokens.

    d = log pi - log ref
    k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d              (Schulman, joschu.net/blog/kl-approx.html)
    loss   r * k1,   stop_gradient(r) * k2,   r * k3           with r = min(pi / anchor, 5)

Tokens were sampled from the anchor, so the ratio makes each estimate one for the *trained* policy. It also gives k1 and
k3 the gradient of the KL: without the ratio, the gradient of k1 is zero on average and that of k3 is the gradient of
the forward KL ("On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477). The gradient of k2
is right without it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from art.config import KlConfig
from art.trainer.losses.base import LossInputs, LossOutput, log_ratio

_MAX_RATIO = 5.0
_LIMIT = 20.0
"""Largest |d| in nats that counts, so that the estimate stays finite."""


def kl_loss(inputs: LossInputs, config: KlConfig) -> LossOutput:
    reference = inputs.streams[str(config.reference)]
    logs = log_ratio(inputs)
    ratio = logs.clamp(max=math.log(_MAX_RATIO)).exp()
    if config.estimator == "k2":
        ratio = ratio.detach()
    values = ratio * kl_estimate(inputs.policy_logprobs - reference, config.estimator)
    cut = (logs > math.log(_MAX_RATIO)).detach()
    return LossOutput(values, torch.zeros_like(cut), cut)


def kl_estimate(difference: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) at tokens of the policy. `difference` [N] is log policy - log reference."""
    difference = difference.clamp(-_LIMIT, _LIMIT)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.expm1(-difference) + difference
