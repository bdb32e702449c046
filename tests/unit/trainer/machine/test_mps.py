"""What is special on Apple's MPS, as far as a machine without it can tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from art.config import EngineConfig, LoraConfig, TrainConfig, TrainerConfig
from art.engines.torch import base_model as engine_model
from art.engines.torch import sampler
from art.protocol.calls import Train
from art.trainer import memory
from art.trainer.policy import base_model as trainer_model
from art.trainer.trainer import Trainer
from tests.support.doubles import FindDoubles
from tests.support.engine import generate, load, make_model, request, tokens, write_adapter
from tests.support.trainer_samples import random_samples

MPS = torch.device("mps")


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch look as it does on Apple silicon."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


@pytest.mark.usefixtures("mac")
def test_both_parts_choose_it_and_keep_the_checkpoint_s_type() -> None:
    assert trainer_model.choose_device(TrainerConfig()) == MPS
    assert engine_model.choose_device(EngineConfig()) == ("mps", "auto")
    assert engine_model.choose_device(EngineConfig(device="cpu")) == ("cpu", torch.float32)


def test_its_failed_allocation_is_recognised_so_that_a_micro_batch_is_halved() -> None:
    told = "MPS backend out of memory (MPS allocated: 17.94 GB, other allocations: 1.30 GB, max allowed: 18.13 GB)"
    assert memory.is_out_of_memory(RuntimeError(told))
    assert not memory.is_out_of_memory(RuntimeError("MPS backend does not support this operation"))


def test_training_makes_no_float64(model_path: Callable[[str], str], tmp_path: Path) -> None:
    trainer = Trainer(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1, max_tokens=64))
    trainer.init_checkpoint(tmp_path / "0000", LoraConfig(rank=4, alpha=8))
    call: dict[str, Any] = {"from_checkpoint": tmp_path / "0000", "to_checkpoint": tmp_path / "0001"}
    with FindDoubles() as found:
        config = TrainConfig(learning_rate=1e-3, mismatch=None, num_minibatches=2)
        trainer.train(Train(samples=random_samples(3), config=config, job_id="job-00000001", **call))
    assert found.num_operations > 500
    assert found.places == set()


def test_sampling_with_an_adapter_makes_no_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On MPS the sampler adds up in float32; the norm of an adapter is added up in float64, on the CPU."""
    monkeypatch.setattr(sampler, "_exact_dtype", lambda device: torch.float32)
    folder = make_model(tmp_path / "qwen3", "qwen3")
    with FindDoubles() as found:
        engine = load(folder)
        engine.load_adapter("a", write_adapter(tmp_path / "adapter", folder, seed=1))
        generate(engine, request(tokens(1, 8), adapter="a"), request(tokens(2, 8), temperature=0.7, top_k=5))
    assert found.num_operations > 500
    on_the_cpu = {"art.engines.torch.sampler._inverse_transform", "art.engines.torch.linear.<genexpr>"}
    assert found.places == on_the_cpu
