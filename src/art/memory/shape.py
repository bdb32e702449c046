"""The shape of a model, read from its `config.json` without torch: layers, heads, MLP, vocabulary and weights."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from art.kernels.activation_bytes import LayerShape

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
