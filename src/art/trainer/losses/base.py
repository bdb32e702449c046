"""Input and output of every loss, and what several losses compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Input of a loss: N targets (trained tokens) of S whole samples of one micro-batch.

    All tensors are [N], on the CPU, and float32 except `samples`. Targets of one sample follow one another, in the
    order of its tokens.
    """

    policy_logprobs: Tensor
    """Log-probs of the targets under the policy that is trained. They carry the gradient."""
    anchor_logprobs: Tensor
    """Denominator of importance ratios: the log-probs under the sampler, or under the policy at the step's start
    (`TrainConfig.anchor`)."""
    sampling_logprobs: Tensor
    """Log-probs under the policy and the constraints that the targets were sampled with."""
    entropy: Tensor
    """Entropy in nats of the policy's distribution that each target is drawn from. It carries a gradient only where a
    term of the loss reads it: `EntropyConfig`, or `CustomLossConfig(entropy_gradient=True)`."""
    advantages: Tensor
    """Credit of each target. It is positive where the target is to become likelier."""
    samples: Tensor
    """int64, index of the target's sample: 0 to S - 1."""
    num_samples: int
    """S. A sample is one path of a rollout. A rollout whose history was edited has several."""
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """More log-probs [N] of the targets, by name: references and the teacher. See `art.trainer.tree.tree`."""

    def where(self, chosen: Tensor) -> LossInputs:
        """Return the inputs of the targets for which `chosen` [N] is true. The number of samples stays."""
        tensors = {each.name: value for each in fields(self) if isinstance(value := getattr(self, each.name), Tensor)}
        streams = {name: values[chosen] for name, values in self.streams.items()}
        return replace(self, **{name: values[chosen] for name, values in tensors.items()}, streams=streams)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Loss of N targets, and which of them a bound of the loss dropped or clipped (for metrics)."""

    values: Tensor  # [N] loss of each target, differentiable in its policy log-prob
    clipped_low: Tensor  # [N] booleans: dropped or clipped because the policy gives less probability than the anchor
    clipped_high: Tensor  # [N] booleans: dropped or clipped because it gives more


def unclipped(values: Tensor) -> LossOutput:
    """Return the loss `values` [N] of targets of which none is dropped or clipped."""
    none = torch.zeros_like(values, dtype=torch.bool)
    return LossOutput(values, none, none)


def weighted_logprobs(inputs: LossInputs, advantages: Tensor, *, low: float = 0.0, high: float | None) -> LossOutput:
    """Compute -stop_gradient(clip(r, low, high)) * A * log pi, with A = `advantages` and r = pi / anchor.

    pi is the policy's probability and anchor that of the sampler, or of the policy at the step's start.

    `clipped_low` and `clipped_high` mark where the weight was clipped. Those tokens are still trained.
    """
    with torch.no_grad():
        ratio = log_ratio(inputs).exp()
        weight = ratio.clamp(low, high)
    return LossOutput(-weight * advantages * inputs.policy_logprobs, ratio < weight, ratio > weight)


def log_ratio(inputs: LossInputs, limit: float = 20.0) -> Tensor:
    """Compute the log importance ratio, log(policy / anchor) [N], clamped to +-`limit` to avoid overflow.

    A ratio above exp(20) = 5e8 means that something broke. It has no gradient.
    """
    return (inputs.policy_logprobs - inputs.anchor_logprobs).clamp(-limit, limit)


def sum_per_sample(inputs: LossInputs, values: Tensor) -> Tensor:
    """Sum `values` [N] over the targets of each sample: [S]."""
    return values.new_zeros(inputs.num_samples).index_add(0, inputs.samples, values)


def mean_per_sample(inputs: LossInputs, values: Tensor) -> Tensor:
    """Average `values` [N] over the targets of each sample: [S], with 0 for a sample without targets."""
    return sum_per_sample(inputs, values) / sum_per_sample(inputs, torch.ones_like(values)).clamp(min=1)
