"""Small random models, adapters for them, and a synchronous way to run an engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from art.config import EngineConfig
from art.config.processes import PREFILL_TOKENS
from art.engine import GenerateRequest, TokenChunk
from art.engines.torch.embedded import Output, TorchEngine
from art.errors import ArtError

VOCAB = 128
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "llama": (transformers.LlamaConfig, {"mlp_bias": True, "attention_bias": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
}
_ids = itertools.count()


def make_model(folder: Path, family: str, **changes: object) -> Path:
    """A float32 model of 2 layers whose outputs differ from token to token."""
    config_class, extra = FAMILIES[family]
    return save_model(folder, config_class(**{**shape(), **extra, **changes}))


def shape() -> dict[str, object]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def save_model(folder: Path, config: transformers.PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():  # biases and norms start constant: make them matter
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(folder)
    return folder


def hf_model(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def hf_logprobs(model: torch.nn.Module, token_ids: list[int]) -> list[float]:
    """Of token_ids[1:], by a plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: float = 8.0,
    modules: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    std: float = 0.2,
    **settings: object,
) -> Path:
    """A random PEFT LoRA adapter for all layers of `model` whose names end in `modules`."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, module in hf_model(model).named_modules():
        if isinstance(module, torch.nn.Linear) and name.rsplit(".", 1)[-1] in modules:
            prefix = f"base_model.model.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=generator) * std
            weights[f"{prefix}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=generator) * std
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def load(model: Path, **settings: object) -> TorchEngine:
    prefill_tokens = settings.pop("prefill_tokens", PREFILL_TOKENS)
    config = EngineConfig(**{"device": "cpu", "num_threads": 1, **settings})
    return TorchEngine.load(str(model), config, prefill_tokens=prefill_tokens)


def request(prompt: Iterable[int], max_tokens: int = 12, **fields: object) -> GenerateRequest:
    defaults = {"request_id": f"r{next(_ids)}", "adapter": None, "stop_token_ids": (), "seed": 7}
    return GenerateRequest(prompt_token_ids=list(prompt), max_tokens=max_tokens, **{**defaults, **fields})


def drain(engine: TorchEngine) -> list[Output]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def generate(engine: TorchEngine, *requests: GenerateRequest) -> list[TokenChunk]:
    """Submit all at once; the results in order of the requests."""
    for one in requests:
        engine.submit(one, stream=False)
    results = {}
    for output in drain(engine):
        if output.error is not None:
            raise output.error
        results[output.request_id] = output.chunk
    return [results[one.request_id] for one in requests]


def score(engine: TorchEngine, token_ids: list[int], adapter: str | None = None) -> list[float]:
    engine.submit_score("score", token_ids, adapter)
    (output,) = drain(engine)
    if output.error is not None:
        raise output.error
    assert output.logprobs is not None
    return output.logprobs


def failed(outputs: list[Output]) -> dict[str, ArtError]:
    return {o.request_id: o.error for o in outputs if o.error is not None}


def tokens(seed: int, length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
