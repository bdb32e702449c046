"""Losses and their gradients against the formulas, written out again in plain float64 Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from art.config import CispoConfig, DppoConfig, LossConfig, PpoConfig
from art.trainer.losses import LossInputs, TokenLoss, sft_loss, term_loss

CONFIGS: list[LossConfig] = [
    DppoConfig(),
    DppoConfig(mask_low=0.05, mask_high=0.1, max_ratio=1.5, log_ratio_penalty=0.3),
    PpoConfig(),
    PpoConfig(clip_low=0.1, clip_high=0.5),
    CispoConfig(),
    CispoConfig(clip_low=0.5, clip_high=0.2),
]


def rl_loss(pi: torch.Tensor, mu: torch.Tensor, advantages: torch.Tensor, config: LossConfig) -> TokenLoss:
    """One sample whose sampler is the anchor."""
    inputs = LossInputs(
        policy_logprobs=pi,
        anchor_logprobs=mu,
        sampling_logprobs=mu,
        advantages=advantages,
        samples=torch.zeros(len(pi), dtype=torch.int64),
        num_samples=1,
    )
    return term_loss(inputs, config)


def plain(pi: float, mu: float, advantage: float, config: LossConfig) -> tuple[float, bool]:
    """(loss, masked) of one target from its log-probs."""
    ratio = math.exp(pi - mu)
    match config:
        case DppoConfig():
            moved = math.exp(pi) - math.exp(mu)
            masked = (advantage > 0 and moved > config.mask_high) or (advantage < 0 and moved < -config.mask_low)
            if masked or advantage == 0:
                return 0.0, masked
            capped = ratio > config.max_ratio
            return -advantage * min(ratio, config.max_ratio) + config.log_ratio_penalty * (pi - mu) ** 2, capped
        case PpoConfig():
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            return -min(ratio * advantage, clipped * advantage), clipped * advantage < ratio * advantage
        case CispoConfig():
            weight = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            return -weight * advantage * pi, weight != ratio


def cases() -> list[tuple[float, float, float]]:
    rng = random.Random(0)
    grid = [(-rng.expovariate(0.7) - 1e-3, -rng.expovariate(0.7) - 1e-3, rng.gauss(0, 1)) for _ in range(400)]
    return [*grid, (-1.0, -1.0, 1.0), (-1.0, -1.0, 0.0), (-0.01, -4.0, 1.0), (-4.0, -0.01, -1.0), (-0.01, -9.0, -1.0)]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_values_and_masks(config: LossConfig) -> None:
    pi, mu, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*cases(), strict=True))
    found = rl_loss(pi, mu, advantage, config)
    expected = [plain(*case, config) for case in cases()]
    assert found.values.tolist() == pytest.approx([value for value, _ in expected], rel=1e-12, abs=1e-12)
    assert found.masked.tolist() == [masked for _, masked in expected]
    assert any(found.masked.tolist())
    assert not all(found.masked.tolist())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gradients_are_those_of_the_formula(config: LossConfig) -> None:
    pi, mu, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*cases(), strict=True))
    pi.requires_grad_()
    rl_loss(pi, mu, advantage, config).values.sum().backward()
    step = 1e-6
    for found, (p, m, a) in zip(pi.grad.tolist(), cases(), strict=True):
        if isinstance(config, CispoConfig):  # its weight is a constant
            weight = min(max(math.exp(p - m), 1 - config.clip_low), 1 + config.clip_high)
            assert found == pytest.approx(-weight * a, rel=1e-9)
            continue
        around = [plain(p + delta, m, a, config) for delta in (-2 * step, -step, step, 2 * step)]
        if len({masked for _, masked in around}) > 1 or _near_kink(p, m, config):
            continue
        assert found == pytest.approx((around[2][0] - around[1][0]) / (2 * step), rel=1e-5, abs=1e-7)


def _near_kink(pi: float, mu: float, config: LossConfig) -> bool:
    edges = [config.max_ratio] if isinstance(config, DppoConfig) else [1 - config.clip_low, 1 + config.clip_high]
    return any(abs(math.exp(pi - mu) - edge) < 1e-4 for edge in edges)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_extreme_log_probs_stay_finite(config: LossConfig) -> None:
    """A token that the sampler called impossible must not turn the whole gradient into NaN."""
    pi = torch.tensor([-1e-6, -1e-6, -800.0, -800.0], requires_grad=True)
    mu = torch.tensor([-800.0, -800.0, -1e-6, -1e-6])
    loss = rl_loss(pi, mu, torch.tensor([1.0, -1.0, 1.0, -1.0]), config)
    loss.values.sum().backward()
    assert loss.values.isfinite().all()
    assert pi.grad.isfinite().all()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_advantage_no_gradient(config: LossConfig) -> None:
    pi = torch.tensor([-1.0, -3.0], requires_grad=True)
    rl_loss(pi, torch.tensor([-2.0, -0.5]), torch.zeros(2), config).values.sum().backward()
    assert pi.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_on_policy_gradient_is_the_policy_gradient(config: LossConfig) -> None:
    """Where policy and sampler agree every loss gives d/dpi = -A."""
    pi = torch.tensor([-1.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.7, -0.2])
    rl_loss(pi, pi.detach(), advantages, config).values.sum().backward()
    assert pi.grad.tolist() == pytest.approx((-advantages).tolist())


def test_sft_is_cross_entropy() -> None:
    loss = sft_loss(torch.tensor([-1.0, -0.25]))
    assert (loss.values.tolist(), loss.masked.tolist()) == ([1.0, 0.25], [False, False])
