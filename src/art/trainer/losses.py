"""Losses of single targets (trained tokens), by kind. The trainer sums what they return.

A loss is a function from `LossInputs` and its configuration to `LossOutput`, all [N]. To add one, write the function,
its configuration in `art.config.losses`, and a line in `_LOSSES`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from art.config import (
    CispoConfig,
    CustomLossConfig,
    DpoConfig,
    DppoConfig,
    GspoConfig,
    KlConfig,
    LossConfig,
    PpoConfig,
    SapoConfig,
)
from art.config.losses import LOSS_PATH_VARIABLE
from art.errors import ConfigError, TrainingError
from art.trainer.tree import TEACHER

_MAX_RATIO = 5.0
"""Largest importance ratio that weighs a token in losses without a bound of their own."""
_LIMIT = 20.0
"""Largest log-ratio in nats that counts, so that its exponential stays finite. exp(20) = 5e8 means that something
broke."""


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
    term of the loss reads it: `EntropyConfig`."""
    advantages: Tensor
    """Credit of each target. It is positive where the target is to become likelier."""
    samples: Tensor
    """int64, index of the target's sample: 0 to S - 1."""
    num_samples: int
    """S. A sample is one path of a rollout. A rollout whose history was edited has several."""
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """More log-probs [N] of the targets, by name: references and the teacher. See `art.trainer.tree`."""

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


def term_loss(inputs: LossInputs, term: LossConfig) -> LossOutput:
    """Compute the loss of each target that `term` configures, without the weight of `term`."""
    return _LOSSES[term.type](inputs, term)


# -- what several losses compute; `art.losses` offers it to custom ones --


def unclipped(values: Tensor) -> LossOutput:
    """Return the loss `values` [N] of targets of which none is dropped or clipped."""
    none = torch.zeros_like(values, dtype=torch.bool)
    return LossOutput(values, none, none)


def log_ratio(inputs: LossInputs, limit: float = _LIMIT) -> Tensor:
    """Compute the log importance ratio, log(policy / anchor) [N], clamped to +-`limit` to avoid overflow.

    It has no gradient where it is clamped.
    """
    return (inputs.policy_logprobs - inputs.anchor_logprobs).clamp(-limit, limit)


def sum_per_sample(inputs: LossInputs, values: Tensor) -> Tensor:
    """Sum `values` [N] over the targets of each sample: [S]."""
    return values.new_zeros(inputs.num_samples).index_add(0, inputs.samples, values)


def mean_per_sample(inputs: LossInputs, values: Tensor) -> Tensor:
    """Average `values` [N] over the targets of each sample: [S], with 0 for a sample without targets."""
    return sum_per_sample(inputs, values) / sum_per_sample(inputs, torch.ones_like(values)).clamp(min=1)


def _weighted_logprobs(inputs: LossInputs, advantages: Tensor, *, low: float = 0.0, high: float | None) -> LossOutput:
    """Compute -stop_gradient(clip(r, low, high)) * A * log pi, with A = `advantages` and r = pi / anchor.

    `clipped_low` and `clipped_high` mark where the weight was clipped. Those tokens are still trained.
    """
    with torch.no_grad():
        ratio = log_ratio(inputs).exp()
        weight = ratio.clamp(low, high)
    return LossOutput(-weight * advantages * inputs.policy_logprobs, ratio < weight, ratio > weight)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, config: PpoConfig | GspoConfig) -> LossOutput:
    plain = ratio * advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    is_clipped = (clipped < plain).detach()
    return LossOutput(-torch.minimum(plain, clipped), is_clipped & (advantages < 0), is_clipped & (advantages > 0))


# -- policy gradients --


def dppo_loss(inputs: LossInputs, config: DppoConfig) -> LossOutput:
    """DPPO, the default loss: importance-weighted policy gradient with the binary total-variation mask.

        r = pi / mu,  d = pi - mu        pi: the policy's probability of the token, mu: the anchor's
        dropped      A > 0 and d > max_move,   or   A < 0 and d < -max_move
        loss         -A * min(r, 5) + log_ratio_penalty * (log r)^2       for tokens that are not dropped

    The mask bounds how far a *probability* moves. So a rare token may multiply its probability without being dropped,
    and a likely token cannot move far. A token with advantage 0 is not trained, so it adds no penalty either.

    Source: "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879), the binary approximation of
    the total variation; penalty and mask values are prime-rl's; the upper clamp of the ratio is our addition, for
    safety.
    """
    policy, anchor, advantages = inputs.policy_logprobs, inputs.anchor_logprobs, inputs.advantages
    log_ratio = policy - anchor
    with torch.no_grad():
        moved = policy.exp() - anchor.exp()
        low = (advantages < 0) & (moved < -config.max_move)
        high = (advantages > 0) & (moved > config.max_move)
        trained = ~(low | high) & (advantages != 0)
        capped = log_ratio > math.log(_MAX_RATIO)
    ratio = log_ratio.clamp(max=math.log(_MAX_RATIO)).exp()  # clamped before exp, which could overflow
    values = -advantages * ratio + config.log_ratio_penalty * log_ratio.square()
    return LossOutput(torch.where(trained, values, 0.0), low, high | (trained & capped))


def reinforce_loss(inputs: LossInputs) -> LossOutput:
    """REINFORCE with importance weights: the off-policy policy gradient.

        r = pi / anchor
        loss   -stop_gradient(r) * A * log pi

    The gradient is unbiased and has the variance of the ratio. CISPO with no lower bound truncates the ratio.
    """
    return _weighted_logprobs(inputs, inputs.advantages, high=None)


def cispo_loss(inputs: LossInputs, config: CispoConfig) -> LossOutput:
    """CISPO: clipped importance weights as constants, gradient through the log-prob of every token.

        r = pi / anchor
        loss   -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) * A * log pi

    Source: "MiniMax-M1" (arXiv 2506.13585); `clip_high=4`, a cap of 5 on the ratio, follows ScaleRL (arXiv 2510.13786).
    """
    return _weighted_logprobs(inputs, inputs.advantages, low=1 - config.clip_low, high=1 + config.clip_high)


def ppo_loss(inputs: LossInputs, config: PpoConfig) -> LossOutput:
    """PPO's clipped surrogate. GRPO, Dr.GRPO and DAPO use it with other advantages and normalisation.

        r = pi / anchor
        loss   -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    Sources: "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), equation 7; the wider upper bound is that of
    DAPO (arXiv 2503.14476).
    """
    return _clipped_surrogate(log_ratio(inputs).exp(), inputs.advantages, config)


def gspo_loss(inputs: LossInputs, config: GspoConfig) -> LossOutput:
    """GSPO: PPO's surrogate on one ratio per sample, the geometric mean over its tokens.

        s   = exp(mean over the sample's targets of log(pi / anchor))
        s_t = stop_gradient(s) * pi / stop_gradient(pi)                     value of s, gradient of the token
        loss   -min(s_t * A, clip(s_t, 1 - clip_low, 1 + clip_high) * A)    of every target

    This is the paper's GSPO-token. If all tokens of a sample have one advantage, loss and gradient equal those of GSPO.
    If turns or tokens have advantages of their own, each learns from its own. Clipping drops a whole sample, so the
    bounds are orders of magnitude tighter than PPO's. With `normalize="rollout"` a sample's targets sum to the paper's
    loss.

    Source: "Group Sequence Policy Optimization" (arXiv 2507.18071), equations 5, 13 and 14; the bounds are those of its
    section 5.1.
    """
    policy = inputs.policy_logprobs
    with torch.no_grad():
        of_sample = mean_per_sample(inputs, log_ratio(inputs)).exp()[inputs.samples]
    return _clipped_surrogate(of_sample * (policy - policy.detach()).exp(), inputs.advantages, config)


def sapo_loss(inputs: LossInputs, config: SapoConfig) -> LossOutput:
    """SAPO: a smooth gate in place of PPO's clip.

        r = pi / anchor,   t = temperature_positive if A > 0, else temperature_negative
        loss   -4 / t * sigmoid(t * (r - 1)) * A

    At r = 1 the gradient is that of the plain policy gradient. It falls smoothly on both sides and is never cut off, so
    no token counts as clipped.

    Source: "Soft Adaptive Policy Optimization" (arXiv 2511.20347), equations 5 and 6, with its temperatures.
    """
    ratio, advantages = log_ratio(inputs).exp(), inputs.advantages
    temperature = torch.where(advantages > 0, config.temperature_positive, config.temperature_negative)
    return unclipped(-4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages)


def distill_loss(inputs: LossInputs) -> LossOutput:
    """On-policy distillation: a token's advantage is the teacher's log-prob minus the policy's.

        a = log teacher - log pi
        loss   -stop_gradient(min(pi / anchor, 5) * a) * log pi

    Without the limit of 5 this is the gradient of the reverse KL(pi || teacher) of every token, also after the policy
    has moved away from the sampler. Rewards are not used.

    Source: "On-policy distillation" (thinkingmachines.ai/blog/on-policy-distillation), which uses the sampler's
    log-prob in place of the policy's, and "On-policy distillation of language models" (arXiv 2306.13649).
    """
    advantages = inputs.streams[TEACHER] - inputs.policy_logprobs.detach()
    return _weighted_logprobs(inputs, advantages, high=_MAX_RATIO)


# -- cross-entropy and preferences --


def rejection_loss(inputs: LossInputs) -> LossOutput:
    """Cross-entropy of the targets with positive advantage (rejection fine-tuning); the others have a loss of 0."""
    return unclipped(torch.where(inputs.advantages > 0, -inputs.policy_logprobs, 0.0))


def dpo_loss(inputs: LossInputs) -> LossOutput:
    """Direct preference optimisation: a loss that is linear in the log-probs and has the gradient of the DPO loss.

        h(rollout) = sum over its tokens of log pi - log reference
        m = beta * (h(chosen) - h(rejected))
        loss of a pair   -log sigmoid(m)

    The loss of a pair depends on all tokens of both rollouts, which may lie in different micro-batches. But its
    gradient is one coefficient per rollout, times the sum of the gradients of that rollout's log-probs. So the
    log-probs are computed first (one forward pass), the coefficients follow in closed form (`judge_preferences`), and
    a plain weighted sum is trained, in which each target's advantage is minus the coefficient of its rollout. Its
    gradient is exact for any packing.

    Source: "Direct Preference Optimization" (arXiv 2305.18290), equation 7.
    """
    return unclipped(-inputs.advantages * inputs.policy_logprobs)


def judge_preferences(
    gains: Mapping[str, float], pairs: Sequence[tuple[str, str]], config: DpoConfig
) -> tuple[dict[str, float], dict[str, float]]:
    """Compute the DPO loss of `pairs` (at least one) of (chosen, rejected) rollout ids.

    Args:
        gains: by rollout id the sum of log pi - log reference over the rollout's tokens.

    Returns:
        By rollout id the derivative of the mean loss with respect to the rollout's summed log-prob; and metrics:
        weighted loss, share of pairs in which the policy prefers the chosen rollout, and mean margin m.
    """
    names = {name: i for i, name in enumerate(gains)}
    h = torch.tensor(list(gains.values()), dtype=torch.float64, requires_grad=True)
    chosen, rejected = (torch.tensor([names[pair[side]] for pair in pairs]) for side in (0, 1))
    margin = config.beta * (h[chosen] - h[rejected])
    loss = -logsigmoid(margin).mean()
    (gradient,) = torch.autograd.grad(loss, h)
    return dict(zip(gains, gradient.tolist(), strict=True)), {
        "loss/train": config.weight * float(loss.detach()),
        "loss/preference_accuracy": float((margin > 0).double().mean()),
        "loss/preference_margin": float(margin.detach().mean()),
    }


# -- terms that are added to a loss --


def kl_loss(inputs: LossInputs, config: KlConfig) -> LossOutput:
    """KL(policy || reference), estimated on the sampled tokens.

        d = log pi - log ref
        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d              (Schulman, joschu.net/blog/kl-approx.html)
        loss   r * k1,   stop_gradient(r) * k2,   r * k3           with r = min(pi / anchor, 5)

    Tokens were sampled from the anchor, so the ratio makes each estimate one for the *trained* policy. It also gives k1
    and k3 the gradient of the KL: without the ratio, the gradient of k1 is zero on average and that of k3 is the
    gradient of the forward KL ("On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477). The
    gradient of k2 is right without it.
    """
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


def entropy_loss(inputs: LossInputs) -> LossOutput:
    """Entropy bonus: the loss falls as the policy's entropy rises, which keeps it exploring.

        S    = -sum_v p_v log p_v            over the tokens that could be drawn, at the sampling temperature
        loss   -S

    The gradient is that of S itself, over the whole distribution, not an estimate from the sampled token.

    Source: "Asynchronous Methods for Deep Reinforcement Learning" (arXiv 1602.01783), section 4; its factor is
    `weight`.
    """
    return unclipped(-inputs.entropy)


# -- custom losses: functions of the user's, trusted code that runs in the trainer's process --


def find_function(config: CustomLossConfig) -> Callable[..., LossOutput]:
    """Import the function of a custom loss, "my_package.losses:my_loss".

    Raises:
        ConfigError: it cannot be imported, is not callable, or does not take `settings`.
    """
    module, _, name = config.function.partition(":")
    for folder in filter(None, os.environ.get(LOSS_PATH_VARIABLE, "").split(os.pathsep)):
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that it hides no module of the trainer's
    try:
        function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:  # importing a module runs its code, which can raise anything
        raise ConfigError(
            f"the trainer cannot import the custom loss {config.function!r}: {type(error).__name__}: {error}. Install "
            "its package in the server's environment, or add its folder to PYTHONPATH before the server starts",
            param="loss",
        ) from error
    if not callable(function):
        raise ConfigError(f"the custom loss {config.function!r} is not a function, but {function!r}", param="loss")
    try:
        inspect.signature(function).bind(None, **config.settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the custom loss {config.function!r} must take `inputs`, and `settings` as keyword arguments "
            f"({', '.join(config.settings) or 'none are given'}): {error}",
            param="loss",
        ) from error
    return function


def custom_loss(inputs: LossInputs, config: CustomLossConfig) -> LossOutput:
    """Call the function of a custom loss, and check what it returns, so that a mistake in it does not train nonsense.

    Raises:
        ConfigError: the function cannot be imported or called like this.
        TrainingError: it raised an error, or returned something that cannot be trained on.
    """
    function = find_function(config)
    # A copy, so that the function cannot change the inputs, and its uses of an entropy without a gradient are noticed.
    own = inputs.where(torch.ones_like(inputs.samples, dtype=torch.bool))
    own = replace(own, entropy=own.entropy.detach().requires_grad_())
    try:
        output = function(own, **config.settings)
    except Exception as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, frames)).strip()
        raise TrainingError(f"the custom loss {config.function!r} raised an error:\n{text}", param="loss") from error
    if problem := _find_problem(output, own):
        raise TrainingError(f"the custom loss {config.function!r} {problem}", param="loss")
    return LossOutput(output.values.to(inputs.policy_logprobs.dtype), output.clipped_low, output.clipped_high)


def _find_problem(output: object, inputs: LossInputs) -> str | None:
    """What is wrong with the result of a custom loss, as the end of a sentence; `None` if nothing is."""
    if not isinstance(output, LossOutput):
        hint = "; wrap the loss of each target by `art.losses.unclipped`" if isinstance(output, Tensor) else ""
        return f"must return an `art.losses.LossOutput`, and returned a {type(output).__name__}{hint}"
    shape = inputs.policy_logprobs.shape
    for name, kind in (("values", "numbers"), ("clipped_low", "booleans"), ("clipped_high", "booleans")):
        tensor = getattr(output, name)
        if not isinstance(tensor, Tensor) or tensor.shape != shape:
            what = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else f"type {type(tensor).__name__}"
            return f"must return `{name}` with one entry per target, of shape {list(shape)}; got {what}"
        if (kind == "booleans") != (tensor.dtype == torch.bool) or tensor.is_complex() or tensor.device.type != "cpu":
            return f"must return `{name}` as {kind} on the CPU; got {tensor.dtype} on {tensor.device}"
    if count := int((~output.values.isfinite()).sum()):
        return f"returned {count} values of {len(output.values)} that are not finite"
    of_policy, of_entropy = None, None
    if output.values.requires_grad:
        read = (inputs.policy_logprobs, inputs.entropy)
        of_policy, of_entropy = torch.autograd.grad(output.values.sum(), read, allow_unused=True, retain_graph=True)
    if of_entropy is not None:
        return (
            "is differentiated with respect to `inputs.entropy`, which has no gradient here; use "
            "`inputs.entropy.detach()`, and add an `EntropyConfig` to `loss` for a bonus"
        )
    if of_policy is None:
        return (
            "does not depend on `inputs.policy_logprobs`, so it would train nothing; check for `.detach()`, "
            "`.item()` and `torch.no_grad()`"
        )
    if not bool(of_policy.isfinite().all()):
        return (
            "has a gradient that is not finite; a branch of `torch.where` that is not taken must have a finite "
            "gradient too"
        )
    return None


_LOSSES: Mapping[str, Callable[[LossInputs, Any], LossOutput]] = {
    "dppo": dppo_loss,
    "ppo": ppo_loss,
    "gspo": gspo_loss,
    "sapo": sapo_loss,
    "cispo": cispo_loss,
    "reinforce": lambda inputs, _: reinforce_loss(inputs),
    "dpo": lambda inputs, _: dpo_loss(inputs),
    "sft": lambda inputs, _: rejection_loss(inputs),
    "distill": lambda inputs, _: distill_loss(inputs),
    "kl": kl_loss,
    "entropy": lambda inputs, _: entropy_loss(inputs),
    "custom": custom_loss,
}
"""Losses by the `type` of their configuration."""
