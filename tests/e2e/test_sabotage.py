"""Engines that serve something else than what was trained, each in its own way: the handshake catches them all.

The steps are as small as they get (a learning rate of 1e-6 moves log-probs by 1e-4 nats), and the saboteurs lie about
the norm of what they loaded, so nothing but the probe can tell.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from art.config import EngineConfig, LoraConfig, TrainConfig, TrainerConfig
from art.engine import AdapterInfo
from art.engines.torch.embedded import TorchEngine
from art.errors import HandshakeError
from art.protocol.calls import Train
from art.protocol.samples import TrainingSample
from art.runtime.publish import publish
from art.storage import checkpoints
from art.trainer.trainer import Trainer
from benchmarks.in_process import InProcessEngine

NUM_TRIES = 20
LENGTH = 32
ADAPTER = "p/m@1"


class Saboteur(InProcessEngine):
    """Loads what `swap` makes of a checkpoint, and says that it has loaded the checkpoint."""

    def __init__(self, engine: TorchEngine, swap: Callable[[Path], Path]) -> None:
        super().__init__(engine)
        self._swap = swap

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        claimed = await super().load_adapter(name, path)
        return replace(await super().load_adapter(name, self._swap(path)), norm=claimed.norm)


class LeakyBatch(InProcessEngine):
    """Applies the adapter of a batch to the base requests in it, as vLLM does on a CPU."""

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__(engine)
        self._batch: list[str | None] = []

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        self._batch.append(adapter)
        await asyncio.sleep(0)
        adapters = [name for name in self._batch if name is not None]
        await asyncio.sleep(0)
        self._batch.clear()
        return await super().score(token_ids, adapters[0] if adapter is None and adapters else adapter)


def samples(seed: int, vocab_size: int) -> list[TrainingSample]:
    rng = random.Random(seed)
    half = LENGTH // 2
    return [
        TrainingSample(
            sample_id=str(i),
            rollout_id=str(i),
            token_ids=[rng.randrange(vocab_size) for _ in range(LENGTH)],
            loss_mask=[place >= half for place in range(LENGTH)],
            sampling_logprobs=[0.0] * half + [-3.0] * half,
            advantages=[0.0] * half + [rng.gauss(0, 1)] * half,
        )
        for i in range(4)
    ]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> TorchEngine:
    return TorchEngine.load(str(tiny_model), EngineConfig(device="cpu", num_threads=1))


class Runs:
    """Two models in training, each as far as somebody has asked for one of its checkpoints."""

    def __init__(self, trainer: Trainer, root: Path, vocab_size: int) -> None:
        self._trainer = trainer
        self._root = root
        self._vocab_size = vocab_size

    def checkpoint(self, model: int, step: int) -> Path:
        path = self._root / str(model) / f"{step:04d}"
        if path.exists():
            return path
        if step == 0:
            self._trainer.init_checkpoint(path, LoraConfig(rank=4, seed=model))
            return path
        call = Train(
            samples=samples(1000 * model + step, self._vocab_size),
            config=TrainConfig(learning_rate=1e-6, mismatch=None),
            from_checkpoint=self.checkpoint(model, step - 1),
            to_checkpoint=path,
            job_id=f"job-{model}-{step:04d}",
        )
        self._trainer.train(call)
        return path


@pytest.fixture(scope="module")
def runs(tiny_model: Path, engine: TorchEngine, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    trainer = Trainer(str(tiny_model), TrainerConfig(device="cpu", num_threads=1))
    return Runs(trainer, tmp_path_factory.mktemp("runs"), engine.info().vocab_size)


def edited(path: Path, folder: Path, edit: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Path:
    """A copy of an adapter with other weights."""
    folder.mkdir()
    save_file(edit(load_file(path / checkpoints.ADAPTER_WEIGHTS)), folder / checkpoints.ADAPTER_WEIGHTS)
    (folder / checkpoints.ADAPTER_CONFIG).write_bytes((path / checkpoints.ADAPTER_CONFIG).read_bytes())
    return folder


def without_layer(weights: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    return {name: array for name, array in weights.items() if f".layers.{layer}." not in name}


def saboteur(kind: str, engine: TorchEngine, runs: Runs, scratch: Path, attempt: int) -> InProcessEngine:
    def zeros(path: Path) -> Path:
        return edited(path, scratch, lambda weights: {name: 0 * array for name, array in weights.items()})

    def layer_dropped(path: Path) -> Path:
        return edited(path, scratch, lambda weights: without_layer(weights, attempt % 2))

    swaps: dict[str, Callable[[Path], Path]] = {
        "an adapter of zeros": zeros,
        "one layer dropped": layer_dropped,
        "of another model": lambda path: runs.checkpoint(1, int(path.name)),
        "the step before": lambda path: runs.checkpoint(0, int(path.name) - 1),
    }
    return LeakyBatch(engine) if kind == "applied to base requests" else Saboteur(engine, swaps[kind])


KINDS = {
    "an adapter of zeros": "differ from the trainer's",
    "one layer dropped": "differ from the trainer's",
    "of another model": "differ from the trainer's",
    "the step before": "differ from the trainer's",
    "applied to base requests": "requests for the base model change by",
}


@pytest.mark.parametrize("tries", [1, pytest.param(NUM_TRIES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
async def test_sabotage_is_caught(kind: str, tries: int, engine: TorchEngine, runs: list[Path], tmp_path: Path) -> None:
    caught = 0
    for attempt in range(tries):
        checkpoint = runs.checkpoint(0, attempt + 2)
        with pytest.raises(HandshakeError, match=KINDS[kind]):
            await publish(saboteur(kind, engine, runs, tmp_path / str(attempt), attempt), ADAPTER, checkpoint)
        caught += 1
    assert caught == tries


@pytest.mark.parametrize("num_steps", [2, pytest.param(NUM_TRIES, marks=pytest.mark.slow)])
async def test_every_honest_step_is_published(num_steps: int, engine: TorchEngine, runs: Runs) -> None:
    for model, step in itertools.product(range(2), range(num_steps + 1)):
        metrics = await publish(InProcessEngine(engine), ADAPTER, runs.checkpoint(model, step))
        assert metrics["publish/probe_gap"] < 1e-4
