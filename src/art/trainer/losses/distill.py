"""On-policy distillation: each token's advantage is what the teacher would have liked better.

    a = log teacher - log sampler                      clamped to [-max_advantage, max_advantage]
    loss   -stop_gradient(min(pi / anchor, 5)) * a * log pi

That is the gradient of the reverse KL(policy || teacher), token by token, on the policy's own samples.

Source: "On-policy distillation" (thinkingmachines.ai/blog/on-policy-distillation) and "On-policy distillation of
language models" (arXiv 2306.13649).
"""

from __future__ import annotations

import torch

from art.config import DistillConfig
from art.trainer.losses.base import TEACHER, LossInputs, TokenLoss, log_ratio

_MAX_RATIO = 5.0


def distill_loss(inputs: LossInputs, config: DistillConfig) -> TokenLoss:
    with torch.no_grad():
        advantages = inputs.streams[TEACHER] - inputs.sampling_logprobs
        if config.max_advantage is not None:
            advantages = advantages.clamp(-config.max_advantage, config.max_advantage)
        ratio = log_ratio(inputs).exp()
        weight = ratio.clamp(max=_MAX_RATIO)
    cut = ratio > weight
    return TokenLoss(-weight * advantages * inputs.policy_logprobs, torch.zeros_like(cut), cut)
