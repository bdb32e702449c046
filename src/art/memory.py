"""A model's shape, and the memory that trainer and engines need for it: arithmetic on `config.json`, without torch.

What one decoder layer keeps per token for the backward pass, for a LoRA of rank 16 on the layers of Qwen3-4B (hidden
2,560, 32 heads of 128, 8 key-value heads, MLP 9,728) in bfloat16:

    "none"        88.3 KiB   inputs of norms and adapted layers; queries, keys, values and outputs; gate and up
    "selective"   25.1 KiB   input of the layer; queries, keys, values and outputs of the attention
    "full"         5.0 KiB   input of the layer

Attention is counted as FlexAttention and flash attention keep it. A test compares these numbers with the tensors that a
layer of this shape saves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from art.config import Dtype, EngineConfig, EngineSettings, LoraConfig, TrainerConfig, VllmConfig
from art.config.processes import DEFAULT_RUNNING

GIB = 2**30
Checkpointing = Literal["none", "selective", "full"]
"""What the backward pass computes again: nothing, each layer except its attention, or each layer."""
MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""From the fastest to the one that takes least memory."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NF4_BYTES = 0.5625
"""Bytes of a 4-bit weight with a float32 scale per block of 64 (arXiv 2305.14314, without double quantisation)."""
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
ALL_TARGETS = (*_QKV, "o_proj", *_GATE_UP, "down_proj")
_DEFAULT_CONTEXT = 32_768


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only language model that its memory depends on, in features per token."""

    hidden: int
    queries: int
    """Query heads times head size."""
    keys: int
    """Key-value heads times head size."""
    num_heads: int
    mlp: int
    """Inner size of the MLP; 0 for a mixture of experts."""
    experts: int
    """Inner size of an expert times experts per token; 0 without experts."""
    experts_per_token: int
    all_experts: int
    """Inner sizes of all experts of a layer together; 0 without experts."""
    has_query_norm: bool
    """Whether queries and keys have norms, as in Qwen3."""
    num_layers: int
    vocab_size: int
    max_context: int
    ties_head: bool
    """Whether embedding and language-model head are one tensor."""
    latent: int
    """Numbers per token and layer that multi-head latent attention (DeepSeek) keeps in place of keys and values."""
    counted_weights: int | None = None
    """Number of weights in the model's files, if they were read."""

    @cached_property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the linear layers of one decoder layer that a LoRA adapts by default, by their usual names.

        Experts are left out, since engines cannot serve adapters of them.
        """
        hidden, queries, keys, mlp = self.hidden, self.queries, self.keys, self.mlp
        ends = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
        ends["o_proj"] = (queries, hidden)
        if mlp:
            ends |= {"gate_proj": (hidden, mlp), "up_proj": (hidden, mlp), "down_proj": (mlp, hidden)}
        return ends

    @property
    def embedding_weights(self) -> int:
        """Number of weights of the embedding and the language-model head."""
        return self.vocab_size * self.hidden * (1 if self.ties_head else 2)

    @property
    def num_weights(self) -> int:
        """Number of weights: those in the files if they were counted, else by the sizes of the matrices."""
        if self.counted_weights is not None:
            return self.counted_weights
        layer = sum(math.prod(sizes) for sizes in self.linear_layers.values()) + 3 * self.hidden * self.all_experts
        return self.embedding_weights + self.num_layers * (layer + 2 * self.hidden) + self.hidden

    @property
    def decoder_weights(self) -> int:
        """Number of weights without embedding and head: those that full fine-tuning trains."""
        return max(0, self.num_weights - self.embedding_weights)

    def adapter_weights(self, lora: LoraConfig) -> int:
        """Number of weights of a LoRA: rank * (in + out) for each adapted layer.

        Where no name of its layers is known to this module, the default's are counted.
        """
        names = target_names(lora)
        chosen = [sizes for name, sizes in self.linear_layers.items() if name in names] or self.linear_layers.values()
        return self.num_layers * lora.rank * sum(map(sum, chosen))

    def kv_bytes_per_token(self, size: int) -> int:
        """Bytes of keys and values of one token in all layers, where a number takes `size` bytes.

        Layers with a sliding window count as whole ones, so the result is an upper bound for them.
        """
        return (self.latent or 2 * self.keys) * self.num_layers * size


def target_names(lora: LoraConfig | None) -> Collection[str]:
    """Return the last parts of the names of the layers that are adapted; all of them without `target_modules`."""
    targets = None if lora is None else lora.target_modules
    return ALL_TARGETS if targets is None else {name.rpartition(".")[2] for name in targets}


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from the content of a Hugging Face `config.json`.

    Raises:
        KeyError: the configuration lacks a size that decoders have.
    """
    text = {**config, **(config.get("text_config") or {})}
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    mlp = int(text.get("intermediate_size") or 4 * hidden)
    head_dim = int(text.get("head_dim") or hidden // heads)
    experts_per_token = int(text.get("num_experts_per_tok") or 0)
    num_experts = next((text[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(k)), 0)
    inner = int(text.get("moe_intermediate_size") or mlp) if experts_per_token else 0
    return ModelShape(
        hidden=hidden,
        queries=heads * head_dim,
        keys=int(text.get("num_key_value_heads") or heads) * head_dim,
        num_heads=heads,
        mlp=0 if experts_per_token else mlp,
        experts=experts_per_token * inner,
        experts_per_token=experts_per_token,
        all_experts=int(num_experts) * inner,
        has_query_norm=str(text.get("model_type")).startswith(("qwen3", "gemma3", "olmo2", "olmo3")),
        num_layers=int(text["num_hidden_layers"]),
        vocab_size=int(text["vocab_size"]),
        max_context=min(_DEFAULT_CONTEXT, int(text.get("max_position_embeddings") or _DEFAULT_CONTEXT)),
        ties_head=bool(text.get("tie_word_embeddings", False)),
        latent=int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0) if text.get("kv_lora_rank") else 0,
    )


def read_shape(base_model: str) -> ModelShape | None:
    """Read the shape of a local model, or of a hub model in this machine's cache; `None` if it cannot be told."""
    config: Any = Path(base_model, "config.json")
    if not config.parent.is_dir():
        from huggingface_hub import try_to_load_from_cache  # slow to import
        from huggingface_hub.errors import HFValidationError

        try:
            config = try_to_load_from_cache(base_model, "config.json")
        except HFValidationError:
            return None
    try:
        config = Path(config)
        shape = shape_of(json.loads(config.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # engine and trainer will report what is wrong with the file
    return replace(shape, counted_weights=count_weights(config.parent))


def count_weights(folder: Path) -> int | None:
    """Count the numbers in the safetensors files of a folder; `None` if there are none, or they cannot be read.

    Only the headers of the files are read.
    """
    from safetensors import SafetensorError, safe_open

    total = 0
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="numpy") as file:
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return None  # engine and trainer will report what is wrong with the files
    return total or None


# -- activations --


def saved_bytes_per_token(
    shape: ModelShape, *, dtype: str, lora: LoraConfig | None, checkpointing: Checkpointing = "none"
) -> int:
    """Return the bytes that one decoder layer keeps per token between its forward and its backward pass.

    `lora` is `None` for full fine-tuning, where every linear layer keeps its input.
    """
    size, targets = _BYTES[dtype], target_names(lora)
    attention = size * 2 * (shape.queries + shape.keys) + 4 * shape.num_heads  # and the log-sum-exp of each head
    if checkpointing == "full":
        return size * shape.hidden
    if checkpointing == "selective":
        return size * shape.hidden + attention
    numbers = 2 * shape.hidden  # inputs of the two norms
    numbers += shape.hidden * any(name in targets for name in _QKV)
    numbers += (shape.queries + shape.keys) * shape.has_query_norm
    if shape.experts:  # gate, up and their product of each expert, and what it adds to the layer
        numbers += 3 * shape.experts + shape.hidden * shape.experts_per_token
    else:
        numbers += shape.hidden * any(name in targets for name in _GATE_UP)
        numbers += 2 * shape.mlp + (shape.mlp if lora is None else 0)
    numbers += 0 if lora is None else lora.rank * sum(name in targets for name in ALL_TARGETS)
    return size * numbers + attention


def activation_bytes(
    shape: ModelShape, num_tokens: int, *, dtype: str, lora: LoraConfig | None, checkpointing: Checkpointing
) -> int:
    """Return the bytes that all layers keep at the peak of a pass over `num_tokens` tokens.

    With checkpointing, the layer whose backward pass runs keeps everything, and the others what `checkpointing` says.
    """
    kept = saved_bytes_per_token(shape, dtype=dtype, lora=lora, checkpointing=checkpointing)
    whole = saved_bytes_per_token(shape, dtype=dtype, lora=lora)
    return num_tokens * (shape.num_layers * kept + (0 if checkpointing == "none" else whole))


# -- trainer and engine --

CPU_TOKENS = 4096
"""Most tokens per micro-batch on a CPU. Larger ones do not run faster there; they leave the cache and take memory."""
PROCESS_BYTES = GIB // 2
"""Python with torch, transformers and peft in main memory (0.41 GiB with torch 2.13 for CPU); or CUDA's context and
kernels on a GPU, approximately."""
_HEAD_BYTES = {"cpu": 2**23, "cuda": 2**30}
"""Logits and a tile of the head that the log-prob head computes with at once."""
_SLACK = {"cpu": 1.9, "cuda": 1.1}
"""Memory that the allocator takes for a pass, as a multiple of the pass's tensors: an assumption on CUDA, fitted to
measurements on a CPU, where it includes float32 attention."""


@dataclass(frozen=True, slots=True)
class Part:
    """Memory that one process needs for one thing, such as the gradients of the trainer."""

    owner: Literal["trainer", "engine"]
    name: str
    size_bytes: int
    remedy: str = ""
    """What makes this part smaller."""

    def __str__(self) -> str:
        return f"{self.owner} {self.name} {self.size_bytes / GIB:.1f} GiB"


def total(parts: Iterable[Part]) -> int:
    return sum(part.size_bytes for part in parts)


def _dtype(dtype: Dtype, device: str) -> str:
    """Type of weights that engine and trainer choose for "auto" on a device ("cpu", "cuda", "mps")."""
    return dtype if dtype != "auto" else "float32" if device == "cpu" else "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """One trainer process: its model, its settings, and the device that it really uses, not "auto"."""

    shape: ModelShape
    config: TrainerConfig
    lora: LoraConfig | None
    """`None` for full fine-tuning."""
    device: str
    checkpointing: Checkpointing

    def between_steps(self) -> tuple[Part, ...]:
        """Forecast what the process holds whatever the micro-batches: model, trained weights, gradients, moments."""
        shape, config, lora = self.shape, self.config, self.lora
        size = _BYTES[_dtype(config.dtype, self.device)]
        if config.quantization == "nf4":  # embedding and head are neither rounded nor split
            base = shape.embedding_weights * size + shape.decoder_weights * _NF4_BYTES
        else:
            shards = config.num_processes if config.shard_base else 1
            gathered = 2 * shape.decoder_weights / shape.num_layers if shards > 1 else 0  # layers while they run
            base = size * (shape.embedding_weights + shape.decoder_weights / shards + gathered)
        num_trained = shape.decoder_weights if lora is None else shape.adapter_weights(lora)
        rounded = size * num_trained if lora is None and size < 4 else 0  # what full fine-tuning computes with
        weights = 'use dtype "bfloat16", `trainer.quantization="nf4"`, `trainer.shard_base` or a smaller base model'
        fewer = "train a LoRA instead of all weights" if lora is None else "lower `lora.rank`"
        table = (
            ("process", PROCESS_BYTES, ""),
            ("base weights", base, weights),
            ("trained weights, now and before the step", 8 * num_trained + rounded, fewer),
            ("gradients", 4 * num_trained, fewer),
            ("optimiser moments", 8 * num_trained / config.num_processes, fewer),
        )
        return tuple(Part("trainer", name, int(size_bytes), remedy) for name, size_bytes, remedy in table)

    def at_peak(self, num_tokens: int) -> tuple[Part, ...]:
        """Forecast the process at its peak with micro-batches of `num_tokens`: in a pass, or in AdamW's update."""
        shape, fixed = self.shape, self.between_steps()
        dtype = _dtype(self.config.dtype, self.device)
        size, inner = _BYTES[dtype], shape.mlp or shape.experts
        kept = activation_bytes(shape, num_tokens, dtype=dtype, lora=self.lora, checkpointing=self.checkpointing)
        # Gradients in the backward pass of one layer's MLP and attention, and hidden states in the log-prob head.
        per_token = size * (6 * shape.hidden + 5 * inner) + 4 * (3 * (shape.queries + shape.hidden) + 2 * shape.keys)
        work = num_tokens * per_token + _HEAD_BYTES.get(self.device, _HEAD_BYTES["cuda"])
        slack = _SLACK.get(self.device, _SLACK["cuda"])
        remedy = "lower `trainer.max_tokens`, or set `trainer.gradient_checkpointing`"
        passing = (
            Part("trainer", "activations", int(slack * kept), remedy),
            Part("trainer", "workspaces of a pass", int(slack * work), remedy),
        )
        moments = fixed[-1]
        updating = (replace(moments, name="workspace of the optimiser"),)
        return fixed + max(passing, updating, key=total)


_ASLEEP_BYTES = 2 * GIB
"""What vLLM keeps of a GPU while it sleeps: CUDA's context and its captured graphs. vLLM's logs report 1 to 1.5 GiB of
each on one GPU (vllm-project/vllm pull requests 11743 and 45623); not measured here."""
_VLLM_HOST_BYTES = 4 * GIB
"""Main memory of vLLM's own processes, approximately."""
_EMBEDDED_SHARE = {"cpu": 0.25, "cuda": 0.4, "mps": 0.25}
"""Most of the memory that the embedded engine gives to its KV cache, as in `art.engines.torch.base_model`."""
_AVERAGE_REQUEST_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineForecast:
    """The forecast memory of an engine on one of its devices."""

    awake: tuple[Part, ...]
    asleep: tuple[Part, ...]
    """What it keeps of the device while it sleeps; equal to `awake` for an engine that cannot sleep."""
    least: tuple[Part, ...]
    """What it needs at least: its weights, and a cache for one request. The other parts adapt to the device."""
    host: Part
    """Main memory of its process, if the device is a GPU."""
    copy: Part
    """Its weights in main memory while it sleeps, of all its devices together."""


def forecast_engine(shape: ModelShape, config: EngineSettings, *, device: str, limit_bytes: int) -> EngineForecast:
    """Forecast an engine on a device ("cpu", "cuda", "mps") with `limit_bytes` of memory."""
    is_vllm = isinstance(config, VllmConfig)
    num_devices = config.num_devices if isinstance(config, VllmConfig) else 1
    size = _BYTES[_dtype(config.dtype, device)]
    context = config.max_context or shape.max_context
    per_token = shape.kv_bytes_per_token(size) // num_devices
    process = Part("engine", "process", _ASLEEP_BYTES if is_vllm and device == "cuda" else PROCESS_BYTES)
    smaller = 'use `engine.dtype` "bfloat16", a smaller base model, or more GPUs'
    weights = Part("engine", "weights", shape.num_weights * size // num_devices, smaller)
    if isinstance(config, VllmConfig):
        cache = GIB  # on a CPU, see `CPU_KV_CACHE_GIB`
        if device == "cuda":  # vLLM takes its share at once, whatever the model's size
            cache = max(0, int(memory_share(config) * limit_bytes) - total((process, weights)))
        remedy = "lower `gpu_memory_utilization` in `engine.flags`"
    else:
        assert isinstance(config, EngineConfig)
        num_tokens = config.kv_cache_tokens or max(context, config.max_running * min(context, _AVERAGE_REQUEST_TOKENS))
        cache = num_tokens * per_token
        if config.kv_cache_tokens is None:
            cache = min(cache, int(_EMBEDDED_SHARE[device] * limit_bytes))
        remedy = "lower `engine.kv_cache_tokens` or `engine.max_running`"
    awake = (process, weights, Part("engine", "KV cache", cache, remedy))
    one = Part("engine", "KV cache of one request", per_token * context, "lower `engine.max_context`")
    copied = Part("engine", "weights in main memory while asleep", shape.num_weights * size, 'set `sleep` to "never"')
    return EngineForecast(
        awake=awake,
        asleep=(process,) if is_vllm else awake,
        least=(process, weights, one),
        host=Part("engine", "processes in main memory", _VLLM_HOST_BYTES if is_vllm else PROCESS_BYTES),
        copy=copied,
    )


def memory_share(config: VllmConfig) -> float:
    """Share of each GPU's memory that vLLM takes: its flag `gpu_memory_utilization`, else its default."""
    flags = {name.replace("-", "_").lstrip("_"): value for name, value in config.flags.items()}
    return float(str(flags.get("gpu_memory_utilization", 0.9)))


_KV_SHARE = 0.85
"""Part of the memory beside the weights that is left for keys and values, after activations and CUDA graphs."""
_AVERAGE_OWN_TOKENS = 2048
"""Tokens of keys and values that an average running request has for itself, beside what it shares with its group. vLLM
pauses requests when this was too little."""


def choose_max_running(
    config: VllmConfig, shape: ModelShape, *, device: str, memory_bytes: int | None, context: int
) -> int:
    """Choose how many requests a vLLM server computes at once, `max_num_seqs`: the setting, or what its memory holds.

    As many as the KV cache holds when each has `_AVERAGE_OWN_TOKENS` or its whole `context`, in multiples of 16, from
    16 to 512, the most for which vLLM records CUDA graphs. `memory_bytes` is that of one GPU; `None` if unknown.

    Example: Qwen3-8B has 16.4 GB of weights, and 144 KiB of keys and values for a token (36 layers, 8 heads of 128). On
    one GPU of 139 GiB that makes room for 320 requests, on one of 80 GiB for 160.
    """
    if config.max_running is not None:
        return config.max_running
    if device != "cuda" or memory_bytes is None:
        return DEFAULT_RUNNING
    size, num_gpus = _BYTES["bfloat16"], config.num_devices // config.num_copies
    free = memory_share(config) * memory_bytes * num_gpus - size * shape.num_weights
    request_bytes = shape.kv_bytes_per_token(size) * min(_AVERAGE_OWN_TOKENS, context)
    fits = int(_KV_SHARE * max(0.0, free) / request_bytes)
    return max(16, min(512, fits // 16 * 16))
