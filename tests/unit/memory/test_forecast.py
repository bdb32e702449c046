"""The forecast of a trainer's memory: its parts follow the settings, and it is near what a real process takes."""

from __future__ import annotations

from typing import Any

import pytest

from art.config import LoraConfig, TrainerConfig
from art.memory.activations import HEAD_TILE, KEPT_PROBABILITIES, Batch
from art.memory.shape import shape_of
from art.memory.trainer import TrainerForecast, TrainerSetup, forecast_trainer, largest_batch
from art.trainer.attention import chain_attention
from art.trainer.step import logprobs
from benchmarks.memory_forecast import QUICK, compare
from tests.support.model_shapes import QWEN3

BATCH = Batch(16_384, longest=8192)
SHAPE = shape_of(QWEN3["8B"])


def forecast(batch: Batch = BATCH, lora: LoraConfig | None = LoraConfig(), device: str = "cuda", **config: Any) -> TrainerForecast:  # fmt: skip  # noqa: B008
    return forecast_trainer(SHAPE, TrainerSetup(config=TrainerConfig(**config), lora=lora, device=device), batch)


def sizes(made: TrainerForecast) -> dict[str, float]:
    return {part.name: part.size_bytes / 2**30 for part in (*made.fixed, *made.passing, *made.updating)}


@pytest.mark.slow
def test_it_is_near_the_peak_of_a_real_process() -> None:
    """A small model in a fresh process, where Python and torch are most of it. `benchmarks memory_forecast` has more."""
    made, peak_bytes = compare(QUICK)
    assert 0.9 < made.peak_bytes / peak_bytes < 1.25


def test_the_parts_of_8b_on_a_gpu() -> None:
    parts = sizes(forecast())
    assert parts["base weights"] == pytest.approx(15.26, abs=0.01)
    assert parts["gradients"] == parts["trained weights"] == parts["optimiser moments"] / 2
    assert 60 < parts["activations"] < 100
    assert "copies of the base weights for speed" not in parts
    assert sizes(forecast(quantization="nf4"))["base weights"] < 7


def test_full_fine_tuning_holds_every_trained_weight_in_float32() -> None:
    lora, full = sizes(forecast()), sizes(forecast(lora=None))
    assert full["trained weights"] == pytest.approx(4 * SHAPE.decoder_weights / 2**30)
    assert full["rounded copy of the trained weights"] == pytest.approx(full["trained weights"] / 2)
    assert full["optimiser moments"] > 100 * lora["optimiser moments"]
    split = sizes(forecast(lora=None, num_processes=4))
    assert split["optimiser moments"] == pytest.approx(full["optimiser moments"] / 4)
    assert split["gradients"] == full["gradients"]


def test_what_saves_memory_is_forecast_to_save_it() -> None:
    plain = forecast()
    assert sizes(forecast(gradient_checkpointing=True))["activations"] < sizes(plain)["activations"] / 8
    assert forecast(shard_base=True, num_processes=4).fixed_bytes < 0.5 * plain.fixed_bytes
    assert forecast(Batch(8192, longest=8192)).peak_bytes < plain.peak_bytes
    assert forecast(dtype="float32").peak_bytes > 1.5 * plain.peak_bytes


def test_a_cpu_keeps_merged_copies_of_small_models() -> None:
    """Those of 8B would take more than is spent on them."""
    setup = TrainerSetup(config=TrainerConfig(), lora=LoraConfig(), device="cpu")
    small = shape_of(QWEN3["0.6B"] | {"num_hidden_layers": 2})
    copies = sizes(forecast_trainer(small, setup, BATCH))["copies of the base weights for speed"]
    assert copies == pytest.approx(4 * small.num_layers * small.linear_weights / 2**30, rel=0.01)
    assert "copies of the base weights for speed" not in sizes(forecast(device="cpu"))


@pytest.mark.parametrize("room_gib", [20, 40, 140])
def test_the_largest_batch_is_the_last_that_fits(room_gib: int) -> None:
    setup = TrainerSetup(config=TrainerConfig(), lora=LoraConfig(), device="cuda")
    num_tokens = largest_batch(SHAPE, setup, room_gib * 2**30)
    peaks = [forecast(Batch(count, longest=count)).peak_bytes / 2**30 for count in (num_tokens, num_tokens + 1)]
    assert peaks[0] <= room_gib < peaks[1]
    assert largest_batch(SHAPE, setup, 2**30) == 0


def test_constants_are_those_of_the_trainer() -> None:
    assert HEAD_TILE == logprobs._TILE
    assert KEPT_PROBABILITIES == chain_attention._KEEP_BYTES
