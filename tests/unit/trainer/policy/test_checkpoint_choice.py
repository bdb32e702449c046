"""`gradient_checkpointing="auto"` takes the least recomputation that fits into memory, in all processes alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from art.config import LoraConfig, TrainerConfig
from art.errors import ConfigError
from art.memory.shape import Checkpointing
from art.trainer.machine.distributed import ALONE
from art.trainer.policy import checkpoint_choice
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.checkpoint_choice import choose_mode, forecast_activations, prepare_checkpointing
from art.trainer.policy.full import FullPolicy
from art.trainer.policy.lora import LoraPolicy
from art.trainer.policy.policy import Policy
from art.trainer.tree.tree import SamplePath, check_sample
from tests.support.trainer_samples import VOCAB_SIZE, random_samples

LORA = LoraConfig(rank=8)
GIB = 2**30
FORECASTS: dict[Checkpointing, int] = {"none": 50 * GIB, "selective": 15 * GIB, "full": 4 * GIB}


class Team:
    """A team whose other process chose something else."""

    def __init__(self, other: str) -> None:
        self.other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


@pytest.fixture
def on_cuda(model_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Policy]:
    """A policy that takes its device for a GPU with so much free memory."""

    def make(free_bytes: int, lora: LoraConfig | None = LORA) -> Policy:
        base = load_base_model(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))
        policy = FullPolicy(base) if lora is None else LoraPolicy(base, lora)
        policy.base = replace(base, device=torch.device("cuda"))
        monkeypatch.setattr(checkpoint_choice, "allocatable_bytes", lambda device: free_bytes)
        return policy

    return make


def paths() -> list[SamplePath]:
    return [path for sample in random_samples(3) if (path := check_sample(sample, vocab_size=VOCAB_SIZE))]


def prepare(policy: Policy, team: Any = ALONE, *, max_tokens: int = 4096, **config: Any) -> dict[str, float]:
    return prepare_checkpointing(policy, TrainerConfig(**config), paths(), max_tokens=max_tokens, team=team)


@pytest.mark.parametrize(
    ("free_gib", "mode"), [(130, "none"), (63, "none"), (62, "selective"), (20, "selective"), (10, "full"), (1, "full")]
)
def test_the_first_that_fits_is_chosen_and_the_log_says_why(
    free_gib: int, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_mode(FORECASTS, 16_384, free_gib * GIB) == mode
    expected = (
        f"gradient checkpointing: {mode}; expected activations of 16384 tokens: none 50.0 GiB, selective 15.0 GiB"
    )
    assert expected in caplog.text
    assert f"80 % of {free_gib}.0 GiB free memory" in caplog.text


def test_an_unknown_shape_is_checkpointed(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_mode({}, 100, 10**15) == "full"
    assert "the shape of this model's layers is unknown" in caplog.text


@pytest.mark.parametrize("lora", [LoraConfig(rank=8), None], ids=["lora", "full"])
def test_auto_follows_the_free_memory_from_step_to_step(
    lora: LoraConfig | None, on_cuda: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = on_cuda(GIB, lora)
    forecasts = forecast_activations(policy, sum(len(path.token_ids) for path in paths()))
    assert forecasts["none"] > forecasts["selective"] > forecasts["full"] > 0
    for number, mode in enumerate(("none", "selective", "full")):
        free = int(forecasts[mode] / 0.8) + 1  # type: ignore[index]
        monkeypatch.setattr(checkpoint_choice, "allocatable_bytes", lambda device, free=free: free)
        metrics = prepare(policy)
        assert metrics["throughput/checkpointing"] == number
        assert metrics["throughput/activations_forecast_bytes"] == forecasts[mode]  # type: ignore[index]
        assert policy.trained_model.training == (mode != "none")


def test_a_micro_batch_holds_at_most_the_limit_or_the_longest_sample(on_cuda: Callable[..., Policy]) -> None:
    policy, lengths = on_cuda(GIB), [len(path.token_ids) for path in paths()]
    found = [prepare(policy, max_tokens=limit)["throughput/activations_forecast_bytes"] for limit in (1, 50, 10**6)]
    expected = [forecast_activations(policy, tokens)["none"] for tokens in (max(lengths), 50, sum(lengths))]
    assert found == expected


def test_all_processes_do_what_the_one_with_least_memory_needs(on_cuda: Callable[..., Policy]) -> None:
    assert prepare(on_cuda(GIB), Team("full"))["throughput/checkpointing"] == 2
    assert prepare(on_cuda(1), Team("none"))["throughput/checkpointing"] == 2


@pytest.mark.parametrize(("setting", "number"), [(False, 0), ("selective", 1), (True, 2), ("auto", 0)])
def test_other_settings_and_other_devices_do_not_ask_for_memory(
    setting: Any, number: int, model_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(checkpoint_choice, "allocatable_bytes")
    config: dict[str, Any] = {"device": "cpu", "num_threads": 1, "gradient_checkpointing": setting}
    base = load_base_model(model_path("Qwen3"), TrainerConfig(**config))
    policy = LoraPolicy(base, LoraConfig(rank=8))
    assert prepare(policy, **config)["throughput/checkpointing"] == number
    assert base.model.training == (number > 0)


@pytest.mark.parametrize("value", ["never", 2, None])
def test_other_words_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="`gradient_checkpointing` must be 'auto' or 'selective'"):
        TrainerConfig(gradient_checkpointing=value)
