"""On-policy distillation: a token's advantage is the teacher's log-prob minus the policy's.

    a = log teacher - log pi                           clamped to [-max_advantage, max_advantage]
    loss   -stop_gradient(min(pi / anchor, 5) * a) * log pi

Without the two limits this is the gradient of the reverse KL(pi || teacher) of every token, also after the policy has
moved away from the sampler. Rewards are not used.

Source: "On-policy distillation" (thinkingmachines.ai/blog/on-policy-distillation), which uses the sampler's log-prob
in place of the policy's, and "On-policy distillation of language models" (arXiv 2306.13649).
"""

from __future__ import annotations

import torch

from art.config import DistillConfig
from art.trainer.losses.base import LossInputs, TokenLoss, log_ratio
from art.trainer.streams import TEACHER

_MAX_RATIO = 5.0


def distill_loss(inputs: LossInputs, config: DistillConfig) -> TokenLoss:
    with torch.no_grad():
        advantages = inputs.streams[TEACHER] - inputs.policy_logprobs
        if config.max_advantage is not None:
            advantages = advantages.clamp(-config.max_advantage, config.max_advantage)
        ratio = log_ratio(inputs).exp()
        weight = ratio.clamp(max=_MAX_RATIO)
    cut = ratio > weight
    return TokenLoss(-weight * advantages * inputs.policy_logprobs, torch.zeros_like(cut), cut)
