"""A trial step measures, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from art.config import LoraConfig, TrainConfig, TrainerConfig
from art.errors import ConfigError, NothingTrainableError, TrainingError
from art.protocol.calls import Train
from art.protocol.samples import TrainingSample
from art.runtime.checks.trial import random_sample
from art.storage import checkpoints
from art.trainer.machine import memory
from art.trainer.trainer import Trainer
from tests.support.trainer_samples import random_samples

LORA = LoraConfig(rank=8, alpha=16)
RL = TrainConfig(learning_rate=1e-2, mismatch=None)


@pytest.fixture
def trainer(model_path: Callable[[str], str]) -> Trainer:
    return Trainer(model_path("Qwen3"), TrainerConfig(device="cpu", num_threads=1))


def long_sample(trainer: Trainer, length: int = 200) -> TrainingSample:
    return random_sample(length=length, vocab_size=trainer._base.vocab_size)


def two_steps(trainer: Trainer, directory: Path, lora: LoraConfig | None, *, trial: bool) -> bytes:
    trainer.init_checkpoint(directory / "0000", lora)
    for number in (1, 2):
        if trial:
            trainer.trial([long_sample(trainer)], lora)
        trainer.train(
            Train(
                samples=random_samples(number),
                config=RL,
                from_checkpoint=directory / f"{number - 1:04d}",
                to_checkpoint=directory / f"{number:04d}",
                job_id=f"job-{number:08d}",
            )
        )
    name = checkpoints.MODEL_WEIGHTS if lora is None else checkpoints.ADAPTER_WEIGHTS
    return (directory / "0002" / name).read_bytes()


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapter", "full"])
def test_training_goes_on_as_if_there_had_been_none(trainer: Trainer, tmp_path: Path, lora: LoraConfig | None) -> None:
    with_trial = two_steps(trainer, tmp_path / "with", lora, trial=True)
    assert with_trial == two_steps(trainer, tmp_path / "without", lora, trial=False)


def test_it_measures_what_a_step_takes(trainer: Trainer) -> None:
    sample = long_sample(trainer)
    took = trainer.trial([sample, replace(sample, sample_id="again")], LORA)
    assert took["num_tokens"] == 400
    assert took["num_tree_tokens"] == 199  # both are the same path, and the last token needs no forward pass
    assert took["seconds"] > 0
    assert took["grad_norm"] > 0
    assert took["peak_memory_bytes"] > 2**20


def test_memory_that_is_left_is_that_of_the_worst_moment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:   5000000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_resident_bytes", lambda: 2000)
    monkeypatch.setattr(memory, "peak_bytes", lambda device: 3000)
    assert memory.headroom_bytes(torch.device("cpu")) == 5_000_000 * 1024 - 1000
    (tmp_path / "memory.max").write_text("10000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    assert memory.headroom_bytes(torch.device("cpu")) == 5000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.headroom_bytes(torch.device("cpu")) == 5_000_000 * 1024 - 1000


def test_what_does_not_fit_into_memory_is_said(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("art.trainer.step.update._backward", out_of_memory)
    with pytest.raises(TrainingError, match="of 199 tokens, does not fit into memory even alone"):
        trainer.trial([long_sample(trainer)], LORA)


def test_what_cannot_be_tried_is_refused(trainer: Trainer) -> None:
    with pytest.raises(NothingTrainableError):
        trainer.trial([], LORA)
    with pytest.raises(ConfigError, match="target_modules"):
        trainer.trial([long_sample(trainer)], LoraConfig(target_modules=["no_such_layer"]))
