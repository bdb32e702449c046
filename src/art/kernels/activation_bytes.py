"""The memory that one decoder layer keeps per token for the backward pass of the trainer, from the model's shape.

For a LoRA on the layers of Qwen3-4B (hidden 2,560, 32 heads of 128, 8 key-value heads, MLP 9,728) in bfloat16, rank 16:

    "none"        88.3 KiB   inputs of norms and adapted layers; queries, keys, values and outputs; gate and up
    "selective"   25.1 KiB   input of the layer; queries, keys, values and outputs of the attention
    "full"         5.0 KiB   input of the layer

Attention is counted as FlexAttention and flash attention keep it. A test compares these numbers with the tensors that a
layer of this shape saves. This module does not need torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

Checkpointing = Literal["none", "selective", "full"]
"""What the backward pass computes again: nothing, each layer except its attention, or each layer."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
ALL_TARGETS = (*_QKV, "o_proj", *_GATE_UP, "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The sizes of a decoder layer, in features per token."""

    hidden: int
    queries: int
    """Query heads times head size."""
    keys: int
    """Key-value heads times head size."""
    num_heads: int
    mlp: int
    """Inner size of the MLP; 0 for a mixture of experts."""
    experts: int = 0
    """Inner size of an expert times experts per token; 0 without experts."""
    experts_per_token: int = 0
    has_query_norm: bool = False
    """Whether queries and keys have norms, as in Qwen3."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the shape from the content of a Hugging Face `config.json`.

        Raises:
            KeyError: the configuration lacks a size that decoders have.
        """
        config = config.get("text_config") or config
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        per_token = int(config.get("num_experts_per_tok") or 0)
        inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
        return cls(
            hidden=hidden,
            queries=heads * head_dim,
            keys=int(config.get("num_key_value_heads") or heads) * head_dim,
            num_heads=heads,
            mlp=0 if per_token else int(config["intermediate_size"]),
            experts=per_token * inner,
            experts_per_token=per_token,
            has_query_norm=str(config.get("model_type", "")).startswith(("qwen3", "gemma3", "olmo2", "olmo3")),
        )


def saved_bytes_per_token(
    shape: LayerShape,
    *,
    dtype: str,
    rank: int | None,
    targets: Collection[str] = ALL_TARGETS,
    checkpointing: Checkpointing = "none",
) -> int:
    """Return the bytes that one decoder layer keeps per token between its forward and its backward pass.

    Args:
        dtype: type of the base weights: "bfloat16", "float16" or "float32".
        rank: rank of the adapter; `None` for full fine-tuning, where every linear layer keeps its input.
        targets: names of the adapted layers.
    """
    size = _BYTES[dtype]
    attention = size * 2 * (shape.queries + shape.keys) + 4 * shape.num_heads  # and the log-sum-exp of each head
    if checkpointing == "full":
        return size * shape.hidden
    if checkpointing == "selective":
        return size * shape.hidden + attention
    targets = ALL_TARGETS if rank is None else targets
    numbers = 2 * shape.hidden  # inputs of the two norms
    numbers += shape.hidden * any(name in targets for name in _QKV)
    numbers += (shape.queries + shape.keys) * shape.has_query_norm
    if shape.experts:  # gate, up and their product of each expert, and what it adds to the layer
        numbers += 3 * shape.experts + shape.hidden * shape.experts_per_token
    else:
        numbers += shape.hidden * any(name in targets for name in _GATE_UP)
        numbers += 2 * shape.mlp + (shape.mlp if rank is None else 0)
    numbers += sum(name in targets for name in ALL_TARGETS) * (rank or 0)
    return size * numbers + attention


def activation_bytes(
    shape: LayerShape,
    *,
    num_layers: int,
    num_tokens: int,
    dtype: str,
    rank: int | None,
    targets: Collection[str] = ALL_TARGETS,
    checkpointing: Checkpointing = "none",
) -> int:
    """Return the bytes that all layers keep at the peak of a pass over `num_tokens` tokens.

    With checkpointing, the layer whose backward pass runs keeps everything, and the others what `checkpointing` says.
    """
    kept = saved_bytes_per_token(shape, dtype=dtype, rank=rank, targets=targets, checkpointing=checkpointing)
    whole = saved_bytes_per_token(shape, dtype=dtype, rank=rank, targets=targets)
    return num_tokens * (num_layers * kept + (0 if checkpointing == "none" else whole))
