"""On-policy distillation: a token's advantage is the teacher's log-prob minus the policy's.

    a = log teacher - log pi                           clamped to [-max_advantage, max_advantage]
    loss   -stop_gradient(min(pi / anchor, 5) * a) * log pi

Without the two limits this is the gradient of the reverse KL(pi || teacher) of every token, also after the policy has
moved away from the sampler. Rewards are not used.

Source: "On-policy distillation" (thinkingmachines.ai/blog/on-policy-distillation), which uses the sampler's log-prob
in place of the policy's, and "On-policy distillation of language models" (arXiv 2306.13649).
"""

from __future__ import annotations

from art.config import DistillConfig
from art.trainer.losses.base import LossInputs, LossOutput, weighted_logprobs
from art.trainer.streams import TEACHER

_MAX_RATIO = 5.0


def distill_loss(inputs: LossInputs, config: DistillConfig) -> LossOutput:
    advantages = inputs.streams[TEACHER] - inputs.policy_logprobs.detach()
    if config.max_advantage is not None:
        advantages = advantages.clamp(-config.max_advantage, config.max_advantage)
    return weighted_logprobs(inputs, advantages, high=_MAX_RATIO)
