"""Losses of single targets in float64: against `objective_reference`, at their limits, and in expectation.

In expectation: summed over a whole vocabulary with the sampler's probabilities, the gradient of a loss is that of what
it estimates, which is computed exactly.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from art.config import (
    CispoConfig,
    DistillConfig,
    DppoConfig,
    GspoConfig,
    KlConfig,
    LossConfig,
    PpoConfig,
    ReinforceConfig,
    SftConfig,
    TrainConfig,
)
from art.trainer.losses import LossInputs, LossOutput, term_loss
from tests.support.objective_reference import LOSSES, Clips, Token

POLICY_GRADIENTS: list[LossConfig] = [
    DppoConfig(),
    DppoConfig(max_move=0.05, log_ratio_penalty=0.3),
    PpoConfig(),
    PpoConfig(clip_low=0.1, clip_high=0.5),
    GspoConfig(clip_low=0.1, clip_high=0.2),
    CispoConfig(),
    CispoConfig(clip_low=0.5, clip_high=0.2),
    ReinforceConfig(),
]
OTHERS: list[LossConfig] = [
    SftConfig(),
    DistillConfig(teacher="p/t"),
    KlConfig(estimator="k1"),
    KlConfig(estimator="k2"),
    KlConfig(estimator="k3"),
]


def inputs(pi: Tensor, mu: Tensor, advantages: Tensor, other: Tensor | None = None) -> LossInputs:
    """Two targets per sample, of a sampler that is the anchor; `other` is the base model and the teacher."""
    samples = torch.arange(len(pi)) // 2
    return LossInputs(
        policy_logprobs=pi,
        anchor_logprobs=mu,
        sampling_logprobs=mu,
        entropy=torch.zeros_like(mu),
        advantages=advantages,
        samples=samples,
        num_samples=int(samples[-1]) + 1,
        streams={name: mu if other is None else other for name in ("base", "teacher")},
    )


def cases() -> list[Tensor]:
    """Log-probs of policy and sampler, advantages and log-probs of another model, of 100 samples of two targets."""
    rng = random.Random(0)
    rows = []
    for _ in range(100):
        advantage = rng.choice([rng.gauss(0, 1), 0.0, 1.0])
        for _ in range(2):
            pi, far, other = (-rng.expovariate(0.7) - 1e-3 for _ in range(3))
            near = pi + rng.gauss(0, 0.3)  # as samplers are, in the main
            rows.append((pi, near if rng.random() < 0.5 else far, advantage, other))
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("config", [*POLICY_GRADIENTS, *OTHERS], ids=str)
def test_values_gradients_and_clips(config: LossConfig) -> None:
    pi, mu, advantages, other = cases()
    ours, theirs = pi.clone().requires_grad_(), pi.clone().requires_grad_()
    found = term_loss(inputs(ours, mu, advantages, other), config)
    found.values.sum().backward()

    tokens = [
        Token(policy=policy, sampler=sampler, start=sampler, teacher=third, references={"base": third}, advantage=a)
        for policy, sampler, third, a in zip(theirs, mu.tolist(), other.tolist(), advantages.tolist(), strict=True)
    ]
    clips = Clips()
    pairs = [LOSSES[config.type](tokens[i : i + 2], config, TrainConfig(), clips) for i in range(0, len(tokens), 2)]
    expected = torch.stack([value for pair in pairs for value in pair])
    expected.sum().backward()

    torch.testing.assert_close(found.values, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)
    assert found.clipped_low.tolist() == [id(token) in clips.low for token in tokens]
    assert found.clipped_high.tolist() == [id(token) in clips.high for token in tokens]
    if config.type not in ("reinforce", "sft"):
        assert 0 < len(clips.low | clips.high) < len(tokens)


@pytest.mark.parametrize("config", [*POLICY_GRADIENTS, *OTHERS], ids=str)
def test_extreme_log_probs_stay_finite(config: LossConfig) -> None:
    """A token that the sampler called impossible must not turn the whole gradient into NaN."""
    pi = torch.tensor([-1e-6, -1e-6, -800.0, -800.0], requires_grad=True)
    mu = torch.tensor([-800.0, -800.0, -1e-6, -1e-6])
    loss = term_loss(inputs(pi, mu, torch.tensor([1.0, -1.0, 1.0, -1.0])), config)
    loss.values.sum().backward()
    assert loss.values.isfinite().all()
    assert pi.grad.isfinite().all()


@pytest.mark.parametrize("config", [*POLICY_GRADIENTS, SftConfig()], ids=str)
def test_no_advantage_no_gradient(config: LossConfig) -> None:
    pi = torch.tensor([-1.0, -3.0], requires_grad=True)
    term_loss(inputs(pi, torch.tensor([-2.0, -0.5]), torch.zeros(2)), config).values.sum().backward()
    assert pi.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("config", POLICY_GRADIENTS, ids=str)
def test_on_policy_gradient_is_the_policy_gradient(config: LossConfig) -> None:
    """Where policy and sampler agree every objective gives d/dpi = -A, also where advantages differ in a sample."""
    pi = torch.tensor([-1.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.7, -0.2])
    term_loss(inputs(pi, pi.detach(), advantages), config).values.sum().backward()
    assert pi.grad.tolist() == pytest.approx((-advantages).tolist())


# -- in expectation --


def distributions() -> list[Tensor]:
    """Logits of policy, sampler and another model over a vocabulary of 8, and an advantage per token."""
    generator = torch.Generator().manual_seed(0)
    policy, sampler, other, advantages = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    return [policy.requires_grad_(), policy.detach() + 0.4 * sampler, other, advantages]


def expectation(config: LossConfig) -> tuple[Tensor, Tensor, LossOutput]:
    """The loss over the vocabulary weighted with the sampler's probabilities, and its gradient by the logits [V]."""
    policy, sampler, other, advantages = distributions()
    mu = sampler.log_softmax(-1)
    loss = term_loss(inputs(policy.log_softmax(-1), mu, advantages, other.log_softmax(-1)), config)
    total = torch.dot(loss.values, mu.exp())
    (gradient,) = torch.autograd.grad(total, policy)
    return total.detach(), gradient, loss


def divergence() -> tuple[Tensor, Tensor]:
    """KL(policy || other) and its gradient."""
    policy, _, other, _ = distributions()
    log_pi = policy.log_softmax(-1)
    kl = torch.dot(log_pi.exp(), log_pi - other.log_softmax(-1))
    (gradient,) = torch.autograd.grad(kl, policy)
    return kl.detach(), gradient


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_has_the_gradient_of_the_kl(estimator: str) -> None:
    kl, expected = divergence()
    value, gradient, loss = expectation(KlConfig(estimator=estimator))
    assert not (loss.clipped_low | loss.clipped_high).any()
    torch.testing.assert_close(gradient, expected)
    if estimator != "k2":  # whose value is biased
        torch.testing.assert_close(value, kl)


def test_distillation_has_the_gradient_of_the_reverse_kl_to_the_teacher() -> None:
    _, gradient, loss = expectation(DistillConfig(teacher="p/t"))
    assert not (loss.clipped_low | loss.clipped_high).any()
    torch.testing.assert_close(gradient, divergence()[1])


@pytest.mark.parametrize(
    "config",
    [ReinforceConfig(), CispoConfig(clip_high=100.0), DppoConfig(max_move=1.0, log_ratio_penalty=0.0)],
    ids=str,
)
def test_unclipped_objectives_have_the_gradient_of_the_expected_advantage(config: LossConfig) -> None:
    policy, _, _, advantages = distributions()
    (expected,) = torch.autograd.grad(-torch.dot(policy.softmax(-1), advantages), policy)
    _, gradient, loss = expectation(config)
    assert not (loss.clipped_low | loss.clipped_high).any()
    torch.testing.assert_close(gradient, expected)
