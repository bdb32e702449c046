"""A decoder loop for the Llama family: the arithmetic of transformers with far fewer Python calls and operators.

Llama, Mistral, Qwen2 and Qwen3 differ only in biases and in Qwen3's normalised heads. The weights are taken from the
loaded transformers model, and projections that read the same input are fused into one. `base_model` compares the result
with transformers' own forward pass before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from art.engines.torch.cache_attention import AttentionFormula, attend
from art.engines.torch.linear import Linear, LinearPart
from art.engines.torch.scheduler import Batch

MODEL_CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    head_norm: Tensor | None  # [heads + kv heads, head_dim], queries first
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    attention: AttentionFormula


class LlamaDecoder:
    """Fast decoder for the Llama family. It takes the weights out of `hf_model`, which cannot be used afterwards."""

    def __init__(self, hf_model: Any, *, windows: Sequence[int | None], max_context: int) -> None:
        """`windows` are the sliding windows of the layers, `None` for layers without one."""
        config, core = hf_model.config, hf_model.model
        self.parts: dict[str, LinearPart] = {}
        self._linears: list[Linear] = []
        self._eps: float = config.rms_norm_eps
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
        self._layers = [self._take_layer(i, *pair) for i, pair in enumerate(zip(core.layers, windows, strict=True))]
        self._norm_weight = core.norm.weight.detach()
        self._head = self._fuse({"lm_head": hf_model.lm_head})
        self.num_linears = len(self._linears)

    def logits(self, batch: Batch) -> Tensor:
        plan, head_dim = batch.plan, self._head_dim
        runs = batch.runs
        num_q, num_qk = self._num_heads, self._num_heads + self._num_kv_heads
        cos, sin = self._cos.index_select(0, batch.positions), self._sin.index_select(0, batch.positions)
        x = F.embedding(batch.token_ids, self._embedding)
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(self._norm(x, layer.input_norm), runs).view(x.shape[0], -1, head_dim)
            qk = qkv[:, :num_qk]
            if layer.head_norm is not None:
                qk = self._norm(qk) * layer.head_norm
            # Swapped halves, and the signs in `sin`, are rotate_half of Hugging Face's RoPE.
            qk = torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), sin)
            attended = attend(plan, i, qk[:, :num_q], qk[:, num_q:], qkv[:, num_qk:], layer.attention)
            x = layer.o(attended.reshape(x.shape[0], -1), runs, x)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm), runs).chunk(2, dim=-1)
            x = layer.down(self._activation(gate).mul_(up), runs, x)
        if batch.sample_rows is not None:
            x = x.index_select(0, batch.sample_rows)
        return self._head(self._norm(x, self._norm_weight), batch.head_runs)

    def _norm(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self._eps)

    def _take_layer(self, index: int, layer: Any, window: int | None) -> _Layer:
        prefix, attention, mlp = f"model.layers.{index}", layer.self_attn, layer.mlp
        head_norm = None
        if hasattr(attention, "q_norm"):
            weights = (attention.q_norm.weight, self._num_heads), (attention.k_norm.weight, self._num_kv_heads)
            head_norm = torch.cat([weight.detach().expand(count, -1) for weight, count in weights])
        return _Layer(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=self._fuse({f"{prefix}.self_attn.{n}_proj": getattr(attention, f"{n}_proj") for n in "qkv"}),
            head_norm=head_norm,
            o=self._fuse({f"{prefix}.self_attn.o_proj": attention.o_proj}),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
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
