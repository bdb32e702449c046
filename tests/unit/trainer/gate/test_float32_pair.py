"""The gate between the embedded engine and the trainer in float32, as narrow as their handshake allows."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from art.config import EngineConfig, LoraConfig, TrainConfig, TrainerConfig
from art.engine import GenerateRequest
from art.engines.torch.embedded import TorchEngine
from art.errors import TrainingError
from art.protocol.calls import Train
from art.protocol.samples import TrainingSample
from art.runtime.publish import publish
from art.storage import checkpoints
from art.trainer.trainer import Trainer
from benchmarks.in_process import InProcessEngine, drain
from tests.support.trainer_samples import VOCAB_SIZE, random_samples

NUM_ROLLOUTS, NUM_TOKENS = 32, 24


class Pair:
    """A trainer with a trained checkpoint, and an engine that has passed the handshake with it."""

    def __init__(self, model: str, folder: Path) -> None:
        self.trainer = Trainer(model, TrainerConfig(device="cpu", num_threads=1))
        self.engine = TorchEngine.load(model, EngineConfig(device="cpu", num_threads=1))
        self.folder, self.probe_gap = folder, None
        self.trainer.init_checkpoint(folder / "0", LoraConfig(rank=8))
        self.train(random_samples(0), TrainConfig(learning_rate=1e-2, mismatch=None), step=0)
        metrics = asyncio.run(publish(InProcessEngine(self.engine), "trained", folder / "1"))
        assert metrics["publish/probe_effect"] > 0.1
        self.probe_gap = metrics["publish/probe_gap"]

    def train(self, samples: list[TrainingSample], config: TrainConfig, *, step: int) -> dict[str, float]:
        call = Train(
            samples=samples, config=config, from_checkpoint=self.folder / str(step),
            to_checkpoint=self.folder / str(step + 1), job_id=str(step), probe_gap=self.probe_gap,
        )  # fmt: skip
        return self.trainer.train(call).metrics

    def judge(self, samples: list[TrainingSample]) -> dict[str, float]:
        try:
            return self.train(samples, TrainConfig(learning_rate=1e-4), step=1)
        finally:
            shutil.rmtree(self.folder / "2", ignore_errors=True)

    def sample(self, temperature: float = 1.0, adapter: str = "trained") -> list[TrainingSample]:
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, VOCAB_SIZE, (NUM_ROLLOUTS, 8)).tolist()
        for number, prompt in enumerate(prompts):
            request = GenerateRequest(
                request_id=str(number), adapter=adapter, prompt_token_ids=prompt, max_tokens=NUM_TOKENS,
                stop_token_ids=(), seed=number, temperature=temperature,
            )  # fmt: skip
            self.engine.submit(request, stream=False)
        chunks = {int(output.request_id): output.chunk for output in drain(self.engine)}
        samples = []
        for number, prompt in enumerate(prompts):
            chunk = chunks[number]
            assert chunk is not None
            samples.append(
                TrainingSample(
                    sample_id=str(number), rollout_id=str(number), token_ids=[*prompt, *chunk.token_ids],
                    loss_mask=[False] * 8 + [True] * NUM_TOKENS, sampling_logprobs=[0.0] * 8 + chunk.logprobs,
                    advantages=[0.0] * 8 + [1.0] * NUM_TOKENS, policy_version=1, temperature=temperature,
                )
            )  # fmt: skip
        return samples


@pytest.fixture
def pair(model_path: Callable[[str], str], tmp_path: Path, request: pytest.FixtureRequest) -> Pair:
    return Pair(model_path(getattr(request, "param", "Qwen3")), tmp_path)


@pytest.mark.parametrize(
    "pair",
    ["Qwen3", "GptOss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Qwen2", "Llama", "Mistral"))],
    indirect=True,
)
def test_an_honest_engine_passes_at_any_temperature(pair: Pair) -> None:
    for temperature in (0.05, 0.3, 1.0, 2.0):
        metrics = pair.judge(pair.sample(temperature))
        assert metrics["offpolicy/mismatch_masked_share"] == 0
        assert metrics["offpolicy/mismatch_noise"] < 1e-4


def test_faults_that_a_wide_gate_let_through_stop_the_step(pair: Pair) -> None:
    half = pair.folder / "half"
    half.mkdir()
    weights = load_file(pair.folder / "1" / checkpoints.ADAPTER_WEIGHTS)
    halved = {name: array * (0.5 if "lora_B" in name else 1.0) for name, array in weights.items()}
    save_file(halved, half / checkpoints.ADAPTER_WEIGHTS)
    shutil.copy(pair.folder / "1" / checkpoints.ADAPTER_CONFIG, half)
    pair.engine.load_adapter("half", half)
    warm = [replace(sample, temperature=1.0) for sample in pair.sample(1.02)]
    for wrong in (pair.sample(adapter="half"), warm):
        with pytest.raises(TrainingError, match="nothing was trained"):
            pair.judge(wrong)
