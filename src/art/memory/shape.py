"""The shape of a model, read from its `config.json` without torch: layers, heads, MLP, vocabulary and weights.

The unit of a memory forecast: one named amount of memory, and sums of these.

The memory that one decoder layer keeps per token for the backward pass of the trainer, from the model's shape.

For a LoRA on the layers of Qwen3-4B (hidden 2,560, 32 heads of 128, 8 key-value heads, MLP 9,728) in bfloat16, rank 16:

    "none"        88.3 KiB   inputs of norms and adapted layers; queries, keys, values and outputs; gate and up
    "selective"   25.1 KiB   input of the layer; queries, keys, values and outputs of the attention
    "full"         5.0 KiB   input of the layer

Attention is counted as FlexAttention and flash attention keep it. A test compares these numbers with the tensors that a
layer of this shape saves. This module does not need torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from art.config import Dtype

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GIB = 2**30

Owner = Literal["trainer", "engine"]


@dataclass(frozen=True, slots=True)
class Part:
    """Memory that one process needs for one thing, such as the gradients of the trainer."""

    owner: Owner
    name: str
    size_bytes: int
    grows_with_tokens: bool = False
    """Whether it grows with the tokens of a micro-batch."""
    is_optional: bool = False
    """Whether the process goes without it where memory is short, and is slower then."""
    remedy: str | None = None
    """What makes this part smaller."""

    def __str__(self) -> str:
        return f"{self.owner} {self.name} {self.size_bytes / GIB:.1f} GiB"


def total(parts: Iterable[Part]) -> int:
    return sum(part.size_bytes for part in parts)


def resolve_dtype(dtype: Dtype, device: str) -> str:
    """Return the type of weights that engine and trainer choose for "auto" on a device ("cpu", "cuda", "mps")."""
    return dtype if dtype != "auto" else "float32" if device == "cpu" else "bfloat16"


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


_MAX_HEADER_BYTES = 100 * 2**20
_DEFAULT_CONTEXT = 32_768
_PLAIN_MLP = ("gpt2", "gptj", "gpt_neo", "gpt_neox", "opt", "phi", "falcon", "bloom", "starcoder2")
"""Families whose MLP is two matrices without a gate."""
_OLDER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions",),
}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only language model that its memory depends on."""

    layer: LayerShape
    num_layers: int
    vocab_size: int
    num_kv_heads: int
    max_context: int
    ties_head: bool
    """Whether embedding and language-model head are one tensor."""
    has_gate: bool = True
    """Whether the MLP multiplies two projections, as in Llama; else it has one, as in GPT-2."""
    all_experts: int = 0
    """Inner sizes of all experts of a layer together; 0 without experts."""
    latent: int = 0
    """Numbers per token and layer that multi-head latent attention (DeepSeek) keeps in place of keys and values."""
    counted_weights: int | None = None
    """Number of weights in the model's files, if they were read."""

    @cached_property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the linear layers of one decoder layer that a LoRA adapts by default, by their usual names.

        Experts are left out, since engines cannot serve adapters of them.
        """
        hidden, queries, keys, mlp = self.layer.hidden, self.layer.queries, self.layer.keys, self.layer.mlp
        layers = {
            "q_proj": (hidden, queries),
            "k_proj": (hidden, keys),
            "v_proj": (hidden, keys),
            "o_proj": (queries, hidden),
        }
        if mlp:
            gate = {"gate_proj": (hidden, mlp)} if self.has_gate else {}
            layers |= gate | {"up_proj": (hidden, mlp), "down_proj": (mlp, hidden)}
        return layers

    @property
    def embedding_weights(self) -> int:
        """Number of weights of the embedding and the language-model head."""
        return self.vocab_size * self.layer.hidden * (1 if self.ties_head else 2)

    @property
    def num_weights(self) -> int:
        """Number of weights: those in the files if they were counted, else by the sizes of the matrices."""
        if self.counted_weights is not None:
            return self.counted_weights
        norms = 2 * self.layer.hidden
        return self.embedding_weights + self.num_layers * (self.linear_weights + norms) + self.layer.hidden

    @property
    def decoder_weights(self) -> int:
        """Number of weights without embedding and head: those that full fine-tuning trains."""
        return max(0, self.num_weights - self.embedding_weights)

    @property
    def linear_weights(self) -> int:
        """Number of weights of the matrices of one decoder layer, experts included."""
        return sum(math.prod(sizes) for sizes in self.linear_layers.values()) + 3 * self.layer.hidden * self.all_experts

    def adapted_layers(self, targets: list[str] | None) -> dict[str, tuple[int, int]]:
        """(in, out) of the linear layers that a LoRA with `target_modules` = `targets` adapts, by name.

        Where no name is known to this module (e.g. "c_attn" of GPT-2), the default's layers are returned.
        """
        chosen = {
            name: sizes
            for name, sizes in self.linear_layers.items()
            if targets is None or any(target.rpartition(".")[2] == name for target in targets)
        }
        return chosen or self.linear_layers

    def adapter_weights(self, rank: int, targets: list[str] | None) -> int:
        """Number of weights of a LoRA: rank * (in + out) for each adapted layer."""
        return self.num_layers * rank * sum(map(sum, self.adapted_layers(targets).values()))

    def kv_bytes_per_token(self, size: int) -> int:
        """Bytes of keys and values of one token in all layers, where a number takes `size` bytes.

        Layers with a sliding window count as whole ones, so the result is an upper bound for them.
        """
        return (self.latent or 2 * self.layer.keys) * self.num_layers * size


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from the content of a Hugging Face `config.json`.

    Raises:
        KeyError: the configuration lacks a size that decoders have.
    """
    text = {**config, **(config.get("text_config") or {})}
    for name, older in _OLDER_NAMES.items():
        if text.get(name) is None and (size := next((text[key] for key in older if text.get(key)), None)):
            text[name] = size
    if text.get("intermediate_size") is None:
        text["intermediate_size"] = 4 * text["hidden_size"]
    text.pop("text_config", None)
    layer = LayerShape.from_config(text)
    num_experts = next((text[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(k)), 0)
    inner = layer.experts // max(1, layer.experts_per_token)
    return ModelShape(
        layer=layer,
        num_layers=int(text["num_hidden_layers"]),
        vocab_size=int(text["vocab_size"]),
        num_kv_heads=int(text.get("num_key_value_heads") or layer.num_heads),
        max_context=min(_DEFAULT_CONTEXT, int(text.get("max_position_embeddings") or _DEFAULT_CONTEXT)),
        ties_head=bool(text.get("tie_word_embeddings", False)),
        has_gate=text.get("model_type") not in _PLAIN_MLP,
        all_experts=int(num_experts) * inner,
        latent=int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0) if text.get("kv_lora_rank") else 0,
    )


def read_shape(base_model: str) -> ModelShape | None:
    """Read the shape of a local model, or of a hub model in this machine's cache; `None` if it cannot be told."""
    folder = Path(base_model)
    config = folder / "config.json" if folder.is_dir() else _cached_config(base_model)
    if config is None:
        return None
    try:
        shape = shape_of(json.loads(config.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # engine and trainer will report what is wrong with the file
    return replace(shape, counted_weights=count_weights(config.parent))


def _cached_config(hub_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # slow to import
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(hub_id, "config.json")
    except HFValidationError:
        return None
    return Path(config) if isinstance(config, str) else None


def count_weights(folder: Path) -> int | None:
    """Count the numbers in the safetensors files of a folder; `None` if there are none, or they cannot be read."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    try:
        return sum(map(_count_in_file, files)) if files else None
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        return None  # engine and trainer will report what is wrong with the files


def _count_in_file(path: Path) -> int:
    """Count the numbers in one safetensors file from its JSON header, which has the shape of every tensor."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
