"""Load a Hugging Face causal language model for serving, and check that it computes what transformers computes.

In general the model's own forward pass is used, with attention and linear layers replaced by ours. The Llama family has
a faster loop. In both cases a packed trial batch is compared with transformers' eager forward pass before the
engine is ready, so an unsupported architecture is refused instead of being served wrongly.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from art.config import EngineConfig, Quantization
from art.engine import EngineInfo
from art.engines.torch import cache_attention as attention
from art.engines.torch.cache_attention import AttentionFormula, AttentionPlan, AttentionProbe, PrefillSegment, attend
from art.engines.torch.kv_cache import LayerShape
from art.engines.torch.linear import Folding, HfLinear, Linear, LinearPart, RunContext
from art.engines.torch.scheduler import Batch
from art.errors import ConfigError
from art.kernels.base_model import loading_options, other_layers

logger = logging.getLogger(__name__)

MAX_DEFAULT_CONTEXT = 32_768
"""Longest context to serve unless `engine.max_context` is set."""
TRIAL_LENGTHS = (9, 1, 6)
"""Lengths of the trial sequences. There are several, to notice leaks between packed sequences."""
_MAX_TRIAL_WINDOW = 256
"""If the sliding window is at most this long, the trial batch includes a longer sequence."""
_TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest allowed difference of logits, relative to the largest logit."""
LLAMA_CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Models that `LlamaDecoder` computes."""
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Types of RoPE whose positions do not depend on the longest sequence of a batch."""

AVERAGE_REQUEST_TOKENS = 4096
"""Expected tokens of a request, used for the default size of the KV cache."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SHARE = {"cpu": 0.25, "cuda": 0.4, "mps": 0.25}
"""Share of the device's memory for the cache (of its free memory, where that is known). The trainer needs the rest."""


class Decoder(Protocol):
    """Protocol of a language model that computes the logits of packed batches."""

    parts: dict[str, LinearPart]
    """The linear layers that adapters may change, by Hugging Face module name."""
    num_linears: int

    def logits(self, batch: Batch) -> Tensor:
        """Compute the logits [rows to sample, vocabulary] of a batch."""


@dataclass(slots=True)
class LoadedModel:
    decoder: Decoder
    info: EngineInfo
    kv_shapes: list[LayerShape]  # per layer
    dtype: torch.dtype


class HfDecoder:
    """Decoder for any architecture: transformers' forward pass with our attention and adaptable linear layers."""

    def __init__(self, hf_model: Any) -> None:
        self.parts: dict[str, LinearPart] = {}
        self._context = RunContext()
        self._model = hf_model
        self._adapted: dict[str, HfLinear] = {}
        self._picks_rows = "logits_to_keep" in inspect.signature(hf_model.forward).parameters
        head = hf_model.get_output_embeddings()
        for name, module in list(hf_model.named_modules()):
            if type(module) is nn.Linear:
                adapted = HfLinear(module, len(self._adapted), self._context, is_head=module is head)
                parent, _, leaf = name.rpartition(".")
                setattr(hf_model.get_submodule(parent), leaf, adapted)
                self._adapted[name] = adapted
        self.num_linears = len(self._adapted)

    def logits(self, batch: Batch) -> Tensor:
        self._context.runs, self._context.head_runs = batch.runs, batch.head_runs
        rows = batch.sample_rows
        picks_rows = rows is not None and self._picks_rows
        logits: Tensor = _forward(self._model, batch, **({"logits_to_keep": rows} if picks_rows else {})).logits[0]
        return logits if rows is None or picks_rows else logits[rows]

    def find_parts(self, batch: Batch) -> None:
        """Find the linear layers whose input has one row per token, by computing all logits of a trial batch.

        Other layers (e.g. experts that see only the tokens routed to them) cannot apply the adapters of a mixed batch.
        """
        self._context.num_rows = batch.token_ids.shape[0]
        self.logits(batch)
        self._context.num_rows = None
        for name, module in self._adapted.items():
            if module.sees_all_rows:
                linear = Linear(module.weight.detach(), None, module.index)
                self.parts[name] = LinearPart(linear, 0, module.out_features)


class _RmsNorm:
    """The function `x / sqrt(mean(x²) + eps) * weight` of the last axis of x, of size d.

    For float32 on the CPU torch has no kernel of its own for it: as `x / hypot(|x|, sqrt(d eps)) * (sqrt(d) weight)`
    it takes fewer operators.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        """`weight` is [d], or [heads, d] with one row for each head of x [N, heads, d]."""
        size = weight.shape[-1]
        self._weight, self._size, self._eps = weight, (size,), eps
        self._scaled, self._floor = weight * math.sqrt(size), weight.new_tensor(math.sqrt(eps * size))
        self._is_split = weight.device.type == "cpu" and weight.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]"""
        if self._is_split:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x / length.hypot_(self._floor)).mul_(self._scaled)
        if self._weight.dim() == 1:
            return F.rms_norm(x, self._size, self._weight, self._eps)
        return F.rms_norm(x, self._size, None, self._eps) * self._weight


@dataclass(slots=True)
class _Layer:
    input_norm: _RmsNorm
    qkv: Linear
    head_norm: _RmsNorm | None  # of [heads + kv heads, head_dim], queries first
    o: Linear
    mlp_norm: _RmsNorm
    gate_up: Linear
    down: Linear
    attention: AttentionFormula


class LlamaDecoder:
    """Fast decoder for the Llama family: the arithmetic of transformers with far fewer Python calls and operators.

    Llama, Mistral, Qwen2 and Qwen3 differ only in biases and in Qwen3's normalised heads. The weights are taken out of
    `hf_model`, which cannot be used afterwards, and projections that read the same input are fused into one.
    """

    def __init__(self, hf_model: Any, *, windows: Sequence[int | None], max_context: int) -> None:
        """`windows` are the sliding windows of the layers, `None` for layers without one."""
        config, core = hf_model.config, hf_model.model
        self.parts: dict[str, LinearPart] = {}
        self._linears: list[Linear] = []
        eps = config.rms_norm_eps
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._head_dim: int = core.layers[0].self_attn.head_dim
        self._activation: Callable[[Tensor], Tensor] = core.layers[0].mlp.act_fn
        self._embedding: Tensor = core.embed_tokens.weight.detach()
        with torch.inference_mode():  # [1, max_context, head_dim] by position, from the model's own rotary module
            like = self._embedding
            cos, sin = core.rotary_emb(like, torch.arange(max_context, device=like.device)[None])
        half = sin.shape[-1] // 2
        self._cos = cos[0][:, None]  # [max_context, 1, head_dim]
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)[:, None]
        layers = zip(core.layers, windows, strict=True)
        self._layers = [self._take_layer(i, layer, window, eps) for i, (layer, window) in enumerate(layers)]
        self._norm = _RmsNorm(core.norm.weight.detach(), eps)
        self._head = self._fuse({"lm_head": hf_model.lm_head})
        self.num_linears = len(self._linears)
        self._folding = Folding(self._linears)

    def logits(self, batch: Batch) -> Tensor:
        plan, head_dim = batch.plan, self._head_dim
        is_folded = self._folding.covers(batch.runs, len(batch.token_ids))
        runs, head_runs = (None, None) if is_folded else (batch.runs, batch.head_runs)
        num_q, num_qk = self._num_heads, self._num_heads + self._num_kv_heads
        cos, sin = self._cos.index_select(0, batch.positions), self._sin.index_select(0, batch.positions)
        x = F.embedding(batch.token_ids, self._embedding)
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.input_norm(x), runs).view(x.shape[0], -1, head_dim)
            qk = qkv[:, :num_qk]
            if layer.head_norm is not None:
                qk = layer.head_norm(qk)
            # Swapped halves, and the signs in `sin`, are rotate_half of Hugging Face's RoPE.
            qk = torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), sin)
            attended = attend(plan, i, qk[:, :num_q], qk[:, num_q:], qkv[:, num_qk:], layer.attention)
            x = layer.o(attended.reshape(x.shape[0], -1), runs, x)
            gate, up = layer.gate_up(layer.mlp_norm(x), runs).chunk(2, dim=-1)
            x = layer.down(self._activation(gate).mul_(up), runs, x)
        if batch.sample_rows is not None:
            x = x.index_select(0, batch.sample_rows)
        return self._head(self._norm(x), head_runs)

    def _take_layer(self, index: int, layer: Any, window: int | None, eps: float) -> _Layer:
        prefix, attention, mlp = f"model.layers.{index}", layer.self_attn, layer.mlp
        head_norm = None
        if hasattr(attention, "q_norm"):
            weights = (attention.q_norm.weight, self._num_heads), (attention.k_norm.weight, self._num_kv_heads)
            head_norm = _RmsNorm(torch.cat([weight.detach().expand(count, -1) for weight, count in weights]), eps)
        return _Layer(
            input_norm=_RmsNorm(layer.input_layernorm.weight.detach(), eps),
            qkv=self._fuse({f"{prefix}.self_attn.{n}_proj": getattr(attention, f"{n}_proj") for n in "qkv"}),
            head_norm=head_norm,
            o=self._fuse({f"{prefix}.self_attn.o_proj": attention.o_proj}),
            mlp_norm=_RmsNorm(layer.post_attention_layernorm.weight.detach(), eps),
            gate_up=self._fuse({f"{prefix}.mlp.{n}_proj": getattr(mlp, f"{n}_proj") for n in ("gate", "up")}),
            down=self._fuse({f"{prefix}.mlp.down_proj": mlp.down_proj}),
            attention=AttentionFormula(attention.scaling, window),
        )

    def _fuse(self, modules: dict[str, nn.Linear]) -> Linear:
        """Fuse `modules` into one layer that computes them side by side. Their own weights are freed."""
        weights = [m.weight.detach() for m in modules.values()]
        biases = [m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias.detach() for m in modules.values()]
        has_bias = any(m.bias is not None for m in modules.values())
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        linear = Linear(weight, torch.cat(biases) if has_bias else None, index=len(self._linears))
        self._linears.append(linear)
        start = 0
        for name, module in modules.items():
            self.parts[name] = LinearPart(linear, start, start + module.out_features)
            start += module.out_features
            module.weight = None  # fused weights are copies: free the original before the next layer is fused
        return linear


def load_model(
    path: str,
    config: EngineConfig,
    inspect_model: Callable[[Any], None] | None = None,
    quantization: Quantization = "none",
) -> LoadedModel:
    """Load the model `path`, a folder or a hub id. `inspect_model` is called with the model as transformers loaded it.

    Raises:
        ConfigError: unknown path, unsupported architecture, or settings that do not fit the model.
    """
    device, dtype = choose_device(config)
    hf_model = _load_hf(path, device, dtype, quantization)
    if inspect_model is not None:
        inspect_model(hf_model)
    dtype = hf_model.dtype
    max_context, longest_context = _max_context(hf_model.config, config.max_context)
    window = getattr(hf_model.config.get_text_config(decoder=True), "sliding_window", None)
    beyond = [window + 8] if window is not None and window <= _MAX_TRIAL_WINDOW else []
    vocab_size = hf_model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, max_context) for length in (*TRIAL_LENGTHS, *beyond)]
    trial = [torch.randint(vocab_size, (n,), generator=generator).to(hf_model.device) for n in lengths]
    # [N, vocabulary], of transformers' own attention
    reference = torch.cat([hf_model(input_ids=ids[None], use_cache=False).logits[0] for ids in trial])
    hf_model.set_attn_implementation(attention.NAME)
    # One packed batch of all trial sequences shows what the layers need, and whether the engine computes the same.
    positions = torch.cat([torch.arange(n, device=hf_model.device) for n in lengths])
    ends = np.cumsum(lengths).tolist()
    segments = [PrefillSegment(start=end - n, end=end) for n, end in zip(lengths, ends, strict=True)]
    batch = Batch(token_ids=torch.cat(trial), positions=positions, plan=AttentionPlan(prefill=segments))
    probe = _probe_attention(hf_model, batch)
    layers = range(len(probe.kv_shapes))
    kind = type(hf_model)
    decoder: Decoder
    if kind.__name__ in LLAMA_CLASSES and kind.__module__.startswith("transformers.models."):
        windows = [probe.windows[i] for i in layers]
        decoder = LlamaDecoder(hf_model, windows=windows, max_context=max_context)
    else:
        decoder = HfDecoder(hf_model)
        decoder.find_parts(batch)
    difference = decoder.logits(batch).float() - reference.float()
    error = float(difference.abs().max()) / float(reference.float().abs().max().clamp(min=1e-6))
    if not error < _TRIAL_TOLERANCE[reference.dtype]:
        problem = f"the engine's logits differ from transformers' by {error:.2g} of the largest logit"
        allowed = f"allowed are {_TRIAL_TOLERANCE[reference.dtype]:.2g}"
        raise ConfigError(f"base model {path!r}: {problem} on a trial batch; {allowed}. Serve it with another engine")
    info = EngineInfo(
        vocab_size=reference.shape[-1], max_context=max_context, longest_context=longest_context,
        dtype=str(dtype).removeprefix("torch."), device=device,
    )  # fmt: skip
    logger.info("loaded %s by %s: %s", path, type(decoder).__name__, info)
    return LoadedModel(decoder, info, [probe.kv_shapes[i] for i in layers], dtype)


def choose_device(config: EngineConfig) -> tuple[str, torch.dtype | str]:
    """Return the device and the dtype to load a model with (`"auto"` is the dtype of its files).

    Raises:
        ConfigError: the configured device does not exist.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device = next(name for name in available if available[name]) if config.device == "auto" else config.device
    if not available[device]:
        raise ConfigError(f"`engine.device` is {device!r}, but torch finds no such device here; use 'auto' or 'cpu'")
    if config.dtype != "auto":
        return device, getattr(torch, config.dtype)
    return device, {"cpu": torch.float32, "cuda": torch.bfloat16, "mps": "auto"}[device]


def _load_hf(path: str, device: str, dtype: torch.dtype | str, quantization: Quantization) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    AttentionInterface.register(attention.NAME, attention.hf_attention)
    AttentionMaskInterface.register(attention.NAME, attention.hf_mask)
    options = loading_options(quantization, device=device, dtype=dtype)
    options |= {"dtype": dtype, "attn_implementation": "eager"}
    try:
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, use_safetensors=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load base model {path!r}: {error}") from error
    name = f"base model {path!r} ({type(model).__name__})"
    if layers := other_layers(model.config):
        problem = "cannot be served by the embedded engine, whose cache holds keys and values of attention and nothing"
        raise ConfigError(f"{name} {problem} else: {layers}; serve it with vLLM")
    if not getattr(model, "_supports_attention_backend", False):
        problem = "does not support transformers' attention interface, which the embedded engine needs"
        raise ConfigError(f"{name} {problem}; serve it with another engine")
    if quantization != "none":
        model = model.dequantize(dtype)  # the rounded weights, as plain tensors
    return model.to(device).eval().requires_grad_(False)


def _max_context(hf_config: Any, setting: int | None) -> tuple[int, int]:
    """The context to serve, which is the setting or by default at most `MAX_DEFAULT_CONTEXT`, and the largest that the
    model and its RoPE support."""
    text = hf_config.get_text_config(decoder=True)
    limit = int(getattr(text, "max_position_embeddings", None) or MAX_DEFAULT_CONTEXT)
    reason = "the model's `max_position_embeddings`"
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    for one in ropes:
        original = int(one.get("original_max_position_embeddings") or limit)
        if one.get("rope_type", "default") not in _STATIC_ROPE and original < limit:
            limit = original
            reason = f"the length up to which {one['rope_type']!r} positions do not depend on the batch"
    if setting is not None and setting > limit:
        raise ConfigError(f"`engine.max_context` is {setting}, but {reason} is {limit}; use at most that")
    return setting or min(limit, MAX_DEFAULT_CONTEXT), limit


def _forward(hf_model: Any, batch: Batch, **options: Any) -> Any:
    """Run transformers' forward pass with the attention of the engine."""
    ids, positions = batch.token_ids[None], batch.positions[None]
    return hf_model(input_ids=ids, position_ids=positions, use_cache=False, art_plan=batch.plan, **options)


def _probe_attention(hf_model: Any, batch: Batch) -> AttentionProbe:
    """Record the attention of each layer in a trial forward pass. Refuse what the engine does not compute."""
    probe = AttentionProbe()
    kind = type(hf_model).__name__
    try:
        _forward(hf_model, batch, art_probe=probe)
    except Exception as error:  # an unknown architecture may raise anything here
        raise ConfigError(f"{kind} does not run with the attention of the embedded engine: {error!r}") from error
    num_layers = hf_model.config.get_text_config(decoder=True).num_hidden_layers
    if sorted(probe.kv_shapes) != list(range(num_layers)):
        probe.problems.add(f"attention in layers {sorted(probe.kv_shapes)} of {num_layers}")
    if probe.problems:
        raise ConfigError(f"the embedded engine cannot serve {kind}: {'; '.join(sorted(probe.problems))}")
    return probe


def kv_budget(model: LoadedModel, config: EngineConfig) -> int:
    """Return how many tokens the KV cache may hold: the configured number, else what requests need and memory allows.

    Raises:
        ConfigError: a single request of full length would not fit.
    """
    max_context = model.info.max_context
    if config.kv_cache_tokens is not None:
        budget, source = config.kv_cache_tokens, f"`engine.kv_cache_tokens` is {config.kv_cache_tokens}"
    else:
        elements = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in model.kv_shapes)
        token_bytes = elements * model.dtype.itemsize
        fits = int(_device_bytes(model.info.device) * _SHARE[model.info.device] / token_bytes)
        needed = max(max_context, config.max_running * min(max_context, AVERAGE_REQUEST_TOKENS))
        budget, source = min(needed, fits), f"the memory allows a KV cache of {fits} tokens"
    if budget < max_context:
        problem = f"{source}, but a request may have `max_context` = {max_context} tokens"
        raise ConfigError(f"{problem}; set a lower `engine.max_context`")
    return budget


def _device_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    if device == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(_CGROUP_LIMIT.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # not in a container, or one without a limit ("max")
        return physical
