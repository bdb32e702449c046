"""Attention over a prefix tree, through transformers' own attention interface.

Every kernel computes the same rule, query q attends key k iff k <= q < subtree_end[k]:

    dense    scaled-dot-product attention with the rule as a boolean mask: the reference, and fast for small layouts
    chains   for the CPU: each chain of the layout is a causal sequence that follows its ancestors
             (`art.trainer.tree.chains`)
    flex     FlexAttention with a block mask, for CUDA

A layer may add a sliding window to the rule, and sinks to the softmax (gpt-oss): see `Formula`.
`art.trainer.attention.kernel_choice` chooses the kernel of a layout.

The model is loaded with `attn_implementation=ATTENTION_NAME` and called with `tree_layout=TreeLayout(...)`. Every layer
passes that keyword argument on to the attention function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from art.errors import ConfigError
from art.trainer.attention.chain_attention import attend_chains
from art.trainer.attention.kept_attention import attend_once
from art.trainer.tree.chains import ChainKeys, make_chain_keys, plan_chains
from art.trainer.tree.tree import PrefixTree

ATTENTION_NAME = "art_prefix_tree"
KernelName = Literal["dense", "chains", "flex"]

_UNSUPPORTED = ("softcap", "position_bias")
"""Attention features that change the formula. No kernel here computes them."""

_SINK_WIDTH = 8
"""Columns that `_with_sink_key` adds to each head: fast kernels need a head size that is a multiple of 8."""


@dataclass(frozen=True, slots=True)
class Formula:
    """Parameters of the attention formula in one layer."""

    scale: float
    window: int | None = None
    """A query sees its own token and the `window - 1` before it; `None` for all."""
    sinks: Tensor | None = None
    """[H] logits that take part in the softmax and have no value."""


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """A batch's prefix tree, in which shared prefixes occur once, as T tokens on the device of the model."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    subtree_end: Tensor  # [T]
    chains: list[ChainKeys]
    kernel: KernelName
    derived: dict[Any, Any] = field(default_factory=dict)
    """Masks and plans by (kernel, window), cached by the first layer that needs them."""


def make_layout(tree: PrefixTree, *, device: torch.device, kernel: KernelName) -> TreeLayout:
    """Copy `tree` to `device`, with what the attention kernel needs."""
    return TreeLayout(
        token_ids=torch.from_numpy(tree.token_ids).to(device),
        positions=torch.from_numpy(tree.positions).to(device),
        subtree_end=torch.from_numpy(tree.subtree_end).to(device),
        chains=[make_chain_keys(chain) for chain in tree.chains] if kernel == "chains" else [],
        kernel=kernel,
    )


def register_attention() -> None:
    """Register the attention over prefix trees with transformers, as `ATTENTION_NAME`. May be called repeatedly."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attend)
    # Without a mask function, transformers infers packed sequences from jumps in positions, and positions of a tree
    # jump everywhere. The layout carries the mask, so the function returns none.
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, G, T, D]
    value: Tensor,  # [1, G, T, D]
    attention_mask: Tensor | None,
    *,
    tree_layout: TreeLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention over a prefix tree: [1, T, H, D]. transformers calls this in every layer.

    Raises:
        ConfigError: the model's layers do not pass on the layout, or use a feature that the trainer does not compute.
    """
    if tree_layout is None:
        raise ConfigError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention function; this model family "
            "cannot be trained"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} uses `{name}` in its attention, which the trainer does not compute"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    formula = Formula(scale, sliding_window, kwargs.get("s_aux"))
    return attend_once(lambda: KERNELS[tree_layout.kernel](query, key, value, tree_layout, formula)), None


def attend_dense(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, formula: Formula) -> Tensor:
    """Compute attention over a prefix tree with a [T, T] boolean mask. Memory and time are quadratic in T."""
    if (mask := layout.derived.get(("dense", formula.window))) is None:
        mask = dense_mask(layout.positions, layout.subtree_end, formula.window)
        layout.derived["dense", formula.window] = mask
    if (times := query.shape[1] // key.shape[1]) > 1:
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    if formula.sinks is not None:
        query, key, value = _with_sink_key(query, key, value, formula.sinks / formula.scale)
        mask = pad(mask, (0, 1), value=True)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=formula.scale).transpose(1, 2)


def _with_sink_key(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn sinks into one more key with value 0: [q, sink] . [0, 1] is the sink, and [q, sink] . [k, 0] is q . k."""
    columns = pad(sinks[:, None], (0, _SINK_WIDTH - 1))[None, :, None].to(query.dtype)  # [1, H, 1, width]
    query = torch.cat([query, columns.expand(-1, -1, query.shape[2], -1)], dim=-1)
    size = key.shape[-1]
    key, value = pad(key, (0, _SINK_WIDTH, 0, 1)), pad(value, (0, 0, 0, 1))
    key[:, :, -1, size] = 1
    return query, key, value


def dense_mask(positions: Tensor, subtree_end: Tensor, window: int | None) -> Tensor:
    """Make the prefix tree's attention mask, [T, T] booleans, queries by keys.

    A query sees its ancestors and itself; with `window`, only keys that are at most `window - 1` positions back.
    """
    index = torch.arange(len(subtree_end), device=subtree_end.device)
    mask = (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])
    if window is not None:
        mask &= positions[:, None] - positions[None, :] < window
    return mask


def _attend_chains(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, formula: Formula) -> Tensor:
    (num_heads, num_tokens), window = query.shape[1:3], formula.window
    if (work := layout.derived.get(("chains", num_heads, window))) is None:
        work = plan_chains(layout.chains, num_tokens=num_tokens, num_heads=num_heads, window=window)
        layout.derived["chains", num_heads, window] = work
    return attend_chains(query, key, value, work, formula.scale, formula.sinks)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, formula: Formula) -> Tensor:
    """Compute attention over a prefix tree by torch's FlexAttention with a block mask."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    window, sinks = formula.window, formula.sinks
    if (mask := layout.derived.get(("flex", window))) is None:
        size, device = len(layout.subtree_end), layout.subtree_end.device
        rule = flex_rule(layout.positions, layout.subtree_end, window)
        mask = create_block_mask(rule, B=None, H=None, Q_LEN=size, KV_LEN=size, device=device)
        layout.derived["flex", window] = mask
    options = {"block_mask": mask, "scale": formula.scale, "enable_gqa": query.shape[1] != key.shape[1]}
    function = _flex_function(query.device.type)
    if sinks is None:
        out = function(query, key, value, **options)
    else:  # attention without a sink, scaled down by the sink's share of the softmax
        out, aux = function(query, key, value, return_aux=AuxRequest(lse=True), **options)
        out = out * torch.sigmoid(aux.lse - sinks.float()[:, None])[..., None].to(out.dtype)
    return out.transpose(1, 2)


def flex_rule(positions: Tensor, subtree_end: Tensor, window: int | None) -> Callable[..., Tensor]:
    """Return the prefix tree's attention rule as a function of single indices, the form that FlexAttention expects."""

    def rule(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = (k <= q) & (q < subtree_end[k])
        if window is not None:
            allowed = allowed & (positions[q] - positions[k] < window)
        return allowed

    return rule


@lru_cache(maxsize=1)
def _flex_function(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Without compilation it materialises all scores, which is only acceptable for small layouts on a CPU.
    function: Callable[..., Any] = torch.compile(flex_attention) if device_type == "cuda" else flex_attention
    return function


KERNELS: dict[KernelName, Callable[[Tensor, Tensor, Tensor, TreeLayout, Formula], Tensor]] = {
    "dense": attend_dense,
    "chains": _attend_chains,
    "flex": attend_flex,
}
