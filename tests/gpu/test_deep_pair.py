"""A correct pair of trainer and engine with 36 layers in bfloat16 passes the handshake and the mismatch gate.

Two correct implementations round differently in every layer. The head is scaled so that the distribution is as sharp as
that of a trained model, where the same rounding of a hidden state moves log-probs more: the pair disagrees by about as
much as measured at real shapes. A wrong policy must still be found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

from art.config import EngineConfig, TrainConfig, TrainerConfig
from art.engine import GenerateRequest
from art.engines.torch.embedded import TorchEngine
from art.errors import HandshakeError, TrainingError
from art.protocol.calls import Train
from art.protocol.samples import TrainingSample
from art.runtime.publish import publish
from art.trainer.trainer import Trainer
from tests.support.cuda import LORA, VOCAB, InProcessEngine, generate

NUM_LAYERS = 36
HIDDEN = {"cpu": 64, "cuda": 1024}
LENGTHS = [5] * 12 + [10] * 8 + [40] * 4
DEVICES = [
    pytest.param("cpu", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.timeout(900),
            pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
        ],
    ),
]


@dataclass(frozen=True, slots=True)
class Pair:
    """Trainer and engine with the same base model, and the checkpoint of step 0."""

    trainer: Trainer
    engine: TorchEngine
    first: Path
    folder: Path

    def publish_to(self, name: str, path: Path, *, stale: Path | None = None) -> Any:
        return publish(cast(Any, InProcessEngine(self.engine, stale=stale)), name, path)

    def train(
        self, samples: list[TrainingSample], start: Path, name: str, **settings: Any
    ) -> tuple[Path, dict[str, float]]:
        end = self.folder / name
        config = TrainConfig(learning_rate=2e-2, **settings)
        call = Train(samples=samples, config=config, from_checkpoint=start, to_checkpoint=end, job_id=name)
        return end, self.trainer.train(call).metrics


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    def make(device: str) -> Pair:
        folder = tmp_path_factory.mktemp(device)
        base = write_base(folder / "base", HIDDEN[device])
        settings = {"device": device, "dtype": "bfloat16"}
        trainer = Trainer(str(base), TrainerConfig.model_validate(settings))
        trainer.init_checkpoint(folder / "0000", LORA)
        engine_settings = settings | {"num_threads": 1, "max_running": len(LENGTHS)}
        engine = TorchEngine.load(str(base), EngineConfig.model_validate(engine_settings), prefill_tokens=64)
        return Pair(trainer, engine, folder / "0000", folder)

    return make


def write_base(path: Path, hidden: int) -> Path:
    """Write a random model whose sampled tokens have an entropy of 1 to 3 nats, and not that of a random guess."""
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=3.0 * hidden**-0.5)  # final hidden states have size 1 per feature
    model.save_pretrained(path)
    return path


def rollouts(engine: TorchEngine, adapter: str) -> list[TrainingSample]:
    requests = [
        GenerateRequest(
            request_id=f"{i}",
            adapter=adapter,
            prompt_token_ids=[(i + 5 * j) % VOCAB for j in range(20)],
            max_tokens=length,
            stop_token_ids=(),
            seed=i,
            temperature=1.0,
        )
        for i, length in enumerate(LENGTHS)
    ]
    samples = []
    for number, (request, chunk) in enumerate(zip(requests, generate(engine, requests), strict=True)):
        before, count = len(request.prompt_token_ids), len(chunk.token_ids)
        samples.append(
            TrainingSample(
                sample_id=request.request_id,
                rollout_id=request.request_id,
                token_ids=request.prompt_token_ids + chunk.token_ids,
                loss_mask=[False] * before + [True] * count,
                sampling_logprobs=[0.0] * before + chunk.logprobs,
                advantages=[0.0] * before + [(-1.0) ** number] * count,
            )
        )
    return samples


@pytest.mark.parametrize("device", DEVICES)
async def test_a_deep_bfloat16_pair_passes_the_handshake_and_a_stale_engine_does_not(
    device: str, make_pair: Callable[[str], Pair]
) -> None:
    pair = make_pair(device)
    metrics = await pair.publish_to("m@0", pair.first)
    assert 0.005 < metrics["publish/probe_gap"] < 0.5  # the pair rounds as differently as real ones do
    second, _ = pair.train(rollouts(pair.engine, "m@0"), pair.first, "0001", mismatch=None)
    metrics = await pair.publish_to("m@1", second)
    assert metrics["publish/probe_gap"] < metrics["publish/probe_effect"]
    with pytest.raises(HandshakeError, match="m@2 was not published"):
        await pair.publish_to("m@2", second, stale=pair.first)


@pytest.mark.parametrize("device", DEVICES)
def test_a_deep_bfloat16_pair_passes_the_mismatch_gate_and_stale_rollouts_do_not(
    device: str, make_pair: Callable[[str], Pair]
) -> None:
    pair = make_pair(device)
    pair.engine.load_adapter("m@0", pair.first)
    samples = rollouts(pair.engine, "m@0")
    second, metrics = pair.train(samples, pair.first, "0001")
    assert 1 < metrics["loss/entropy"] < 3
    assert 0.01 < metrics["offpolicy/first_update_gap"] < 0.1  # nats per token, as real pairs have
    assert metrics["offpolicy/mismatch_masked_share"] == 0
    with pytest.raises(TrainingError, match="sampling log-probs that the trainer does not reproduce"):
        pair.train(samples, second, "0002")  # sampled by step 0, which step 1 does not resemble
