"""Configurations of well-known models, as in their `config.json`."""

from __future__ import annotations

from typing import Any


def qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, *, kv_heads: int = 8, **changes: Any
) -> dict[str, Any]:
    """A model of the Qwen3 family."""
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": hidden < 4096,
        "max_position_embeddings": 40_960,
        **changes,
    }


QWEN3 = {
    "0.6B": qwen3(1024, 3072, 28, 16),
    "1.7B": qwen3(2048, 6144, 28, 16),
    "4B": qwen3(2560, 9728, 36, 32),
    "8B": qwen3(4096, 12288, 36, 32),
    "14B": qwen3(5120, 17408, 40, 40),
    "32B": qwen3(5120, 25600, 64, 64),
}
"""Dense models by their number of weights."""

QWEN3_MOE = {
    **QWEN3["4B"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
"""Qwen3-30B-A3B: 30.5 billion weights."""
