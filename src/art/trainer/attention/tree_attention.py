"""Attention over a prefix tree, through transformers' own attention interface.

Every kernel computes the one rule, query q attends key k iff k <= q < subtree_end[k]:

    dense    scaled-dot-product attention under the rule as a boolean mask: the reference, and fine for small layouts
    chains   the CPU kernel: a chain of the layout is a causal sequence after its ancestors (`art.trainer.tree.chains`)
    flex     FlexAttention with a block mask, for CUDA

A layer may add a sliding window to the rule, and sinks to the softmax (gpt-oss): see `Formula`.

Which of them runs a layout is for `art.trainer.attention.kernel_choice` to say.

A model is loaded with `attn_implementation=ATTENTION_NAME` and called with `tree_layout=TreeLayout(...)`, which reaches
the attention function as a keyword argument of every layer.
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
from art.trainer.tree.chains import ChainKeys, make_chain_keys, plan_chains
from art.trainer.tree.tree import PrefixTree

ATTENTION_NAME = "art_prefix_tree"
KernelName = Literal["dense", "chains", "flex"]

_UNSUPPORTED = ("softcap", "position_bias")
"""Attention features that change the formula and that no kernel here computes."""


_SINK_WIDTH = 8
"""Of the heads in `_with_sink_key`: fast kernels want their size to be a multiple of 8."""


@dataclass(frozen=True, slots=True)
class Formula:
    """What one layer's attention computes over the tree."""

    scale: float
    window: int | None = None
    """A query sees its own token and the `window - 1` before it; `None` for all."""
    sinks: Tensor | None = None
    """[H] logits that share in the softmax and lead to no value."""


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """A `PrefixTree` on the device of the model, with what kernels derive from it."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    subtree_end: Tensor  # [T]
    chains: list[ChainKeys]
    kernel: KernelName
    derived: dict[Any, Any] = field(default_factory=dict)
    """Masks by (kind, window), made by the first layer that needs them."""


def make_layout(tree: PrefixTree, *, device: torch.device, kernel: KernelName) -> TreeLayout:
    """`tree` on `device`, to be run by `kernel`."""
    return TreeLayout(
        token_ids=torch.from_numpy(tree.token_ids).to(device),
        positions=torch.from_numpy(tree.positions).to(device),
        subtree_end=torch.from_numpy(tree.subtree_end).to(device),
        chains=[make_chain_keys(chain) for chain in tree.chains] if kernel == "chains" else [],
        kernel=kernel,
    )


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers. Harmless when repeated."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attend)
    # Without a mask function of our own, transformers guesses packed sequences from jumps in positions, and those of
    # a tree jump everywhere. The layout carries the mask, so nothing is left to make.
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


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
    """The attention function that transformers calls in every layer. Returns [1, T, H, D].

    Raises:
        ConfigError: the model's layers do not pass the layout on, or use a feature that is not computed here.
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
    return KERNELS[tree_layout.kernel](query, key, value, tree_layout, formula), None


def attend_dense(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, formula: Formula) -> Tensor:
    """The rule as a mask: [T, T] booleans, so memory and time are quadratic in the layout."""
    mask = layout.derived.get(("dense", formula.window))
    if mask is None:
        mask = dense_mask(layout.positions, layout.subtree_end, formula.window)
        layout.derived["dense", formula.window] = mask
    key, value = (_repeat_heads(x, query.shape[1] // key.shape[1]) for x in (key, value))
    if formula.sinks is not None:
        query, key, value = _with_sink_key(query, key, value, formula.sinks / formula.scale)
        mask = pad(mask, (0, 1), value=True)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=formula.scale).transpose(1, 2)


def _with_sink_key(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sinks as one more key with the value 0: [q, sink] . [0, 1] is the sink, and [q, sink] . [k, 0] as before."""
    columns = pad(sinks[:, None], (0, _SINK_WIDTH - 1))[None, :, None].to(query.dtype)  # [1, H, 1, width]
    query = torch.cat([query, columns.expand(-1, -1, query.shape[2], -1)], dim=-1)
    size = key.shape[-1]
    key, value = pad(key, (0, _SINK_WIDTH, 0, 1)), pad(value, (0, 0, 0, 1))
    key[:, :, -1, size] = 1
    return query, key, value


def dense_mask(positions: Tensor, subtree_end: Tensor, window: int | None) -> Tensor:
    """[T, T] booleans, queries by keys. With a sliding window a key is also at most `window - 1` places back."""
    index = torch.arange(len(subtree_end), device=subtree_end.device)
    mask = (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])
    if window is not None:
        mask &= positions[:, None] - positions[None, :] < window
    return mask


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _chains(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, formula: Formula) -> Tensor:
    (num_heads, num_tokens), window = query.shape[1:3], formula.window
    work = layout.derived.get(("chains", num_heads, window))
    if work is None:
        work = plan_chains(layout.chains, num_tokens=num_tokens, num_heads=num_heads, window=window)
        layout.derived["chains", num_heads, window] = work
    return attend_chains(query, key, value, work, formula.scale, formula.sinks)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, formula: Formula) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    window, sinks = formula.window, formula.sinks
    mask = layout.derived.get(("flex", window))
    if mask is None:
        size, device = len(layout.subtree_end), layout.subtree_end.device
        rule = flex_rule(layout.positions, layout.subtree_end, window)
        mask = create_block_mask(rule, B=None, H=None, Q_LEN=size, KV_LEN=size, device=device)
        layout.derived["flex", window] = mask
    options = {"block_mask": mask, "scale": formula.scale, "enable_gqa": query.shape[1] != key.shape[1]}
    function = _flex_function(query.device.type)
    if sinks is None:
        out: Tensor = function(query, key, value, **options)
    else:  # its share of the softmax is taken off what attention without a sink gives
        out, aux = function(query, key, value, return_aux=AuxRequest(lse=True), **options)
        out = out * torch.sigmoid(aux.lse - sinks.float()[:, None])[..., None].to(out.dtype)
    return out.transpose(1, 2)


def flex_rule(positions: Tensor, subtree_end: Tensor, window: int | None) -> Callable[..., Tensor]:
    """The rule as FlexAttention wants it, a function of single indices."""

    def rule(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = (k <= q) & (q < subtree_end[k])
        if window is not None:
            allowed = allowed & (positions[q] - positions[k] < window)
        return allowed

    return rule


@lru_cache(maxsize=1)
def _flex_function(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled it materialises all scores, which only a small forward pass on CPU can afford.
    function: Callable[..., Any] = torch.compile(flex_attention) if device_type == "cuda" else flex_attention
    return function


KERNELS: dict[KernelName, Callable[[Tensor, Tensor, Tensor, TreeLayout, Formula], Tensor]] = {
    "dense": attend_dense,
    "chains": _chains,
    "flex": attend_flex,
}
