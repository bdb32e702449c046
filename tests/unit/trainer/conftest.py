"""Tiny random models of several families."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.trainer_samples import VOCAB_SIZE

if TYPE_CHECKING:
    from tests.support.objective_bench import Bench

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}


def make_model(family: str) -> Any:
    """A float32 model with random weights."""
    import transformers

    extra: dict[str, dict[str, Any]] = {
        "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
        "Qwen2": {},  # biases on q, k and v
        "Llama": {"tie_word_embeddings": False, "mlp_bias": True},
        "Mistral": {"sliding_window": 7, "head_dim": 8},  # shorter than the test sequences
        "GptOss": {  # sinks, a sliding window in every other layer, experts
            "sliding_window": 7,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 16,
        },
    }
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **extra[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():  # biases and norms start at constants; make them count
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")) or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Threads that wait for each other actively make tiny tensors many times slower on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Directory of a saved tiny model of a family."""
    root = tmp_path_factory.mktemp("models")

    def path(family: str) -> str:
        if not (root / family).exists():
            make_model(family).save_pretrained(root / family)
        return str(root / family)

    return path


@pytest.fixture(scope="session")
def bench(model_path: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Where the proofs of objectives run their steps. Every step starts from the same checkpoint."""
    from tests.support.objective_bench import Bench

    return Bench(model_path("Qwen3"), tmp_path_factory.mktemp("bench"))
