"""The law of the trainer: the prefix tree's gradient equals that of the same sequences trained one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from art.config import CispoConfig, DppoConfig, EntropyConfig, LoraConfig, LossConfig, PpoConfig, TrainerConfig
from art.protocol.samples import COMPONENTS, Component, TrainingSample
from art.trainer import block_attention
from art.trainer import tree_attention as attention
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step import micro_batch
from art.trainer.tree_attention import KernelName
from tests.support.trainer_reference import reference_gradient, reference_loss, relative_error, tree_gradient
from tests.support.trainer_samples import random_samples

TOLERANCE = 1e-5
FAMILIES = ["Qwen3", "Qwen2", "Llama", "Mistral", "GptOss"]
LOSSES = [DppoConfig(), PpoConfig(), CispoConfig()]


@pytest.fixture(scope="module")
def policies(model_path: Callable[[str], str]) -> Callable[..., LoraPolicy]:
    """Policies by family, with random B matrices so that every gradient is at work."""
    made: dict[Any, LoraPolicy] = {}

    def policy(family: str, **config: Any) -> LoraPolicy:
        key = (family, *config.items())
        if key not in made:
            base = load_base_model(model_path(family), TrainerConfig(device="cpu", num_threads=1, **config))
            made[key] = LoraPolicy(base, LoraConfig(rank=8, alpha=16))
            made[key].values.copy_(
                torch.randn(made[key].values.shape, generator=torch.Generator().manual_seed(2)) * 0.2
            )
        return made[key]

    return policy


@pytest.fixture(scope="module")
def one_by_one(policies: Callable[..., LoraPolicy]) -> Callable[..., tuple[torch.Tensor, float]]:
    """Gradient and loss of a family's policy over random samples, computed once for all tests that compare with it."""

    @cache
    def reference(family: str, seed: int, count: int) -> tuple[torch.Tensor, float]:
        policy, samples = policies(family), random_samples(seed, count=count)
        return reference_gradient(policy, samples, DppoConfig()), reference_loss(policy, samples, DppoConfig())

    return reference


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[KernelName], None]:
    """Force a kernel whatever the size of the layout."""

    def choose(name: KernelName) -> None:
        monkeypatch.setattr(micro_batch, "choose_kernel", lambda base, num_tokens: name)

    return choose


@pytest.mark.parametrize("kernel_name", ["dense", "blocks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_equals_one_by_one(
    family: str,
    kernel_name: KernelName,
    kernel: Callable[[KernelName], None],
    policies: Callable[..., LoraPolicy],
    one_by_one: Callable[..., tuple[torch.Tensor, float]],
) -> None:
    kernel(kernel_name)
    for seed in range(3):
        expected, expected_loss = one_by_one(family, seed, 8)
        found, loss = tree_gradient(policies(family), random_samples(seed, count=8))
        assert relative_error(found, expected) < TOLERANCE
        assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("block", [1, 3, 96])
@pytest.mark.parametrize("family", ["Qwen3", "Mistral"])
def test_the_size_of_blocks_changes_nothing(
    family: str,
    block: int,
    kernel: Callable[[KernelName], None],
    policies: Callable[..., LoraPolicy],
    one_by_one: Callable[..., tuple[torch.Tensor, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel("blocks")
    monkeypatch.setattr(block_attention, "QUERIES_AT_ONCE", block)
    found, _ = tree_gradient(policies(family), random_samples(5, count=12))
    assert relative_error(found, one_by_one(family, 5, 12)[0]) < TOLERANCE


@pytest.mark.parametrize("loss", [*LOSSES, EntropyConfig(weight=1.0)], ids=lambda loss: loss.type)
def test_every_loss(loss: LossConfig, policies: Callable[..., LoraPolicy]) -> None:
    samples = random_samples(7)
    found, _ = tree_gradient(policies("Qwen3"), samples, loss)
    assert relative_error(found, reference_gradient(policies("Qwen3"), samples, loss)) < TOLERANCE


def test_sft_and_mixed_components(policies: Callable[..., LoraPolicy]) -> None:
    samples = mixture(8)
    for batch in (samples, [s for s in samples if s.component == "sft"]):
        found, _ = tree_gradient(policies("Qwen3"), batch)
        assert relative_error(found, reference_gradient(policies("Qwen3"), batch, DppoConfig())) < TOLERANCE


def mixture(seed: int, weights: dict[Component, float] | None = None) -> list[TrainingSample]:
    """Random samples of all components in one tree. The loss of a component in `weights` is its mean times the weight."""
    samples = [replace(s, component=COMPONENTS[i % 3]) for i, s in enumerate(random_samples(seed, count=12))]
    return [
        replace(s, weight=weights[s.component], share=float(sum(s.loss_mask)), temperature=1.0)
        if weights and s.component in weights
        else s
        for s in samples
    ]


@pytest.mark.parametrize("max_tokens", [20, 4096])
def test_a_mixed_update_is_the_weighted_sum_of_updates_of_each_component(
    max_tokens: int, policies: Callable[..., LoraPolicy]
) -> None:
    """Each component has its own divisor: more supervised data does not make the rewards quieter."""
    policy, scales = policies("Qwen3"), {"rl": 1.0, "sft": 0.3, "observation": 0.05}
    weights: dict[Component, float] = {"sft": scales["sft"], "observation": scales["observation"]}
    mixed, mixed_loss = tree_gradient(policy, mixture(21, weights), max_tokens=max_tokens)
    alone = {
        name: tree_gradient(policy, [s for s in mixture(21, {"sft": 1.0, "observation": 1.0}) if s.component == name])
        for name in COMPONENTS
    }
    expected = sum(scales[name] * alone[name][0].double() for name in COMPONENTS)
    assert isinstance(expected, torch.Tensor)
    assert relative_error(mixed, expected) < TOLERANCE
    assert mixed_loss == pytest.approx(sum(scales[name] * alone[name][1] for name in COMPONENTS), rel=1e-5)
    assert all(relative_error(mixed, alone[name][0]) > 0.1 for name in COMPONENTS), "each has a part in it"


def test_gradient_checkpointing_changes_nothing(policies: Callable[..., LoraPolicy]) -> None:
    samples = random_samples(10)
    checkpointed = policies("Qwen3", gradient_checkpointing=True)
    expected = tree_gradient(policies("Qwen3"), samples)[0]
    assert relative_error(tree_gradient(checkpointed, samples)[0], expected) < TOLERANCE


@pytest.mark.parametrize("max_tokens", [1, 20, 60, 4096])
def test_micro_batch_size_changes_nothing(max_tokens: int, policies: Callable[..., LoraPolicy]) -> None:
    samples = random_samples(11, count=14)
    expected, expected_loss = tree_gradient(policies("Qwen3"), samples)
    found, loss = tree_gradient(policies("Qwen3"), samples, max_tokens=max_tokens)
    assert relative_error(found, expected) < TOLERANCE
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)


def test_order_of_samples_changes_nothing(policies: Callable[..., LoraPolicy]) -> None:
    samples = random_samples(12, count=14)
    expected, _ = tree_gradient(policies("Qwen3"), samples)
    found, _ = tree_gradient(policies("Qwen3"), samples[::-1])
    assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.type)
def test_zero_advantage_gives_zero_gradient(loss: LossConfig, policies: Callable[..., LoraPolicy]) -> None:
    samples = [replace(s, advantages=[0.0] * len(s.token_ids)) for s in random_samples(13)]
    gradient, value = tree_gradient(policies("Qwen3"), samples, loss)
    assert (float(gradient.abs().max()), value) == (0.0, 0.0)


def test_a_wrong_mask_would_be_noticed(
    kernel: Callable[[KernelName], None], policies: Callable[..., LoraPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison has teeth: attention that also sees siblings fails it."""
    policy = policies("Llama")  # loaded with the right mask: else the model is run one sequence at a time
    kernel("dense")
    monkeypatch.setattr(
        attention, "dense_mask", lambda positions, end, window: torch.ones(len(end), len(end), dtype=torch.bool).tril()
    )
    samples = random_samples(0)
    found, _ = tree_gradient(policy, samples)
    assert relative_error(found, reference_gradient(policy, samples, DppoConfig())) > 100 * TOLERANCE
