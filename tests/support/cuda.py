"""A random model with an adapter on any device, computed by the engine, by the trainer, and by transformers with peft."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from art.config import EngineConfig, LoraConfig, Quantization, TrainerConfig
from art.engine import AdapterInfo, EngineInfo, GenerateRequest, TokenChunk
from art.engines.torch.embedded import Output, TorchEngine
from art.protocol.samples import TrainingSample
from art.trainer.policy.base_model import load_base_model
from art.trainer.policy.lora import LoraPolicy
from art.trainer.step.micro_batch import split_micro_batches
from art.trainer.step.record import StepRecord
from art.trainer.step.update import Update, compute_gradient
from art.trainer.tree import check_sample
from benchmarks.gradients import LOSS

VOCAB = 256
LORA = LoraConfig(rank=8, alpha=16)
ADAPTER = "test@1"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    base: Path
    adapter: Path


def make_files(folder: Path, family: str) -> ModelFiles:
    """Heads of 32, since FlexAttention takes none below 16; outputs differ from token to token."""
    extra: dict[str, Any] = {
        "Qwen3": {},
        "Mistral": {"sliding_window": 50},
        "GptOss": {"sliding_window": 50, "num_local_experts": 4, "num_experts_per_tok": 2},
    }[family]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **extra,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(folder / "base")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if family == "GptOss" else "all-linear"
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=LORA.rank, lora_alpha=LORA.alpha, target_modules=targets)
    adapted = peft.get_peft_model(model, settings)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(folder / "adapter")
    return ModelFiles(folder / "base", folder / "adapter")


# -- transformers and peft --


def load_peft(files: ModelFiles, device: str, dtype: str) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(
        files.base, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    return peft.PeftModel.from_pretrained(base.to(device), files.adapter, is_trainable=True).eval()


def plain_logprobs(model: Any, token_ids: list[int], temperature: float = 1.0) -> Tensor:
    """Of token_ids[1:], on the model's device."""
    ids = torch.tensor([token_ids], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


# -- the trainer --


def load_policy(files: ModelFiles, device: str, dtype: str) -> LoraPolicy:
    config = TrainerConfig.model_validate({"device": device, "dtype": dtype})
    policy = LoraPolicy(load_base_model(str(files.base), config), LORA)
    policy.load(files.adapter / "adapter_model.safetensors")
    return policy


def tree_gradient(
    policy: LoraPolicy, samples: list[TrainingSample], max_tokens: int = 4096
) -> tuple[Tensor, StepRecord]:
    """[P] on the CPU, and what the passes saw."""
    paths = [path for sample in samples if (path := check_sample(sample, vocab_size=VOCAB))]
    update, record = Update(paths=paths, learning_rate=1.0, terms=(LOSS,)), StepRecord()
    compute_gradient(policy, update, split_micro_batches(paths, policy.base, max_tokens=max_tokens), record)
    return policy.grads.cpu().clone(), record


def make_samples(seed: int) -> list[TrainingSample]:
    """A group of four branching rollouts behind a prompt that fills more than a block of FlexAttention, and one alone."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    prompt = tokens(140)
    stem = prompt + tokens(30)
    paths = [stem + tokens(50), stem + tokens(20), prompt + tokens(64), prompt + tokens(1), tokens(90)]
    samples = []
    for number, path in enumerate(paths):
        mask = [i > 0 and rng.random() < 0.6 for i in range(len(path) - 1)] + [True]
        samples.append(
            TrainingSample(
                sample_id=str(number),
                rollout_id=str(number),
                token_ids=path,
                loss_mask=mask,
                sampling_logprobs=[-rng.uniform(3, 7) if m else 0.0 for m in mask],
                advantages=[rng.gauss(0, 1) if m else 0.0 for m in mask],
            )
        )
    return samples


# -- the engine --


def load_engine(
    files: ModelFiles, device: str, dtype: str, quantization: Quantization = "none", **settings: Any
) -> TorchEngine:
    config = {"device": device, "dtype": dtype, "num_threads": 1, "max_running": 8}
    engine = TorchEngine.load(
        str(files.base), EngineConfig.model_validate(config | settings), quantization, prefill_tokens=32
    )
    engine.load_adapter(ADAPTER, files.adapter)
    return engine


def generate(engine: TorchEngine, requests: list[GenerateRequest]) -> list[TokenChunk]:
    """All at once; results in the order of the requests."""
    for request in requests:
        engine.submit(request, stream=False)
    chunks = {output.request_id: output.chunk for output in drain(engine)}
    return [chunk for request in requests if (chunk := chunks[request.request_id]) is not None]


def drain(engine: TorchEngine) -> list[Output]:
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs


class InProcessEngine:
    """What a publish needs of an `Engine`. With `stale` it serves those adapter files whatever it is asked to load."""

    def __init__(self, engine: TorchEngine, *, stale: Path | None = None) -> None:
        self._engine, self._stale = engine, stale

    async def info(self) -> EngineInfo:
        return self._engine.info()

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        return self._engine.load_adapter(name, self._stale or path)

    async def unload_adapter(self, name: str) -> None:
        self._engine.unload_adapter(name)

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        self._engine.submit_score("score", token_ids, adapter)
        (output,) = drain(self._engine)
        assert output.logprobs is not None
        return output.logprobs
