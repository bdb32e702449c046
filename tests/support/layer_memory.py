"""Measure the bytes that decoder layers keep for the backward pass, with weights that are all zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from art.protocol.samples import plain_sample
from art.trainer.logprobs import Head
from art.trainer.policy.base_model import FrozenModel, run_backbone
from art.trainer.tree import build_tree, check_sample
from art.trainer.tree_attention import (
    ATTENTION_NAME,
    KERNELS,
    AttentionFormula,
    TreeLayout,
    make_layout,
    register_attention,
)

SHAPE_4B: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""Sizes of a layer of Qwen3-4B."""
VOCAB = 64


def zero_model(family: str, num_layers: int, dtype: torch.dtype, **config: Any) -> FrozenModel:
    """A base model of a transformers family on the CPU, whose memory is not touched before it runs."""
    import transformers

    register_attention()
    settings = {"vocab_size": VOCAB, "num_hidden_layers": num_layers, "tie_word_embeddings": True, **config}
    made = getattr(transformers, f"{family}Config")(**settings)
    made._attn_implementation = ATTENTION_NAME
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(made).to(dtype)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    model.requires_grad_(False).eval()
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out.detach().requires_grad_())
    head, cpu = Head(model.lm_head.weight, None), torch.device("cpu")
    return FrozenModel(name="zero", source="zero", model=model, backbone=model.model, head=head, device=cpu)


@contextmanager
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let the kernel `flex` be torch's flash attention, which keeps what FlexAttention keeps. Yields the calls."""
    calls: list[int] = []

    def flash(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, formula: AttentionFormula) -> Tensor:
        calls.append(query.shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=formula.scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    with monkeypatch.context() as patch:
        patch.setitem(KERNELS, "flex", flash)
        yield calls


def one_path(num_tokens: int, device: torch.device) -> TreeLayout:
    """The layout of a single sequence of `num_tokens`."""
    path = check_sample(plain_sample([i % VOCAB for i in range(num_tokens + 1)], "one"), vocab_size=VOCAB)
    assert path is not None
    return replace(make_layout(build_tree([path]), device=device, kernel="dense"), kernel="flex")  # without padding


def saved_bytes(base: FrozenModel, num_tokens: int) -> int:
    """Bytes of the different storages that the graph of a forward pass holds, without parameters and inputs."""
    layout = one_path(num_tokens, base.device)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*base.model.parameters(), layout.token_ids)}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run_backbone(base, layout)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in seen.items() if place not in own)


def held_bytes(base: FrozenModel, num_tokens: int) -> int:
    """Return the bytes that a forward pass allocates and that are not freed before the backward pass."""
    layout = one_path(num_tokens, base.device)
    before = torch.cuda.memory_allocated() if base.device.type == "cuda" else 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = run_backbone(base, layout)
    assert out.requires_grad
    if base.device.type == "cuda":
        return torch.cuda.memory_allocated() - before
    return int(sum(event.self_cpu_memory_usage for event in profile.key_averages()))
