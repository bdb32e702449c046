"""Compiled FlexAttention over a prefix tree, and its block mask.

torch.compile makes a graph for each set of shapes and flags that it meets and counts the graphs of a function. Above
the limit (8 by default) torch runs the function uncompiled and only logs a warning; FlexAttention then materialises all
scores, 34 GB at 16,384 tokens and 32 heads in float32. So each kind of layer, `FlexKind`, has a function of its own,
which compiles a graph for the first length and one for all others; the limit is raised for these functions; and hitting
it, or running uncompiled for any other reason, is an error.

FlexAttention skips a block of queries by keys that is empty, evaluates the rule in a partial one, and computes a full
one without the rule. The extremes of a block tell which of the three it is. For queries [q0, q1) and keys before them,

    some query sees some key      if   q0 < max(subtree_end)
    every query sees every key    if   q1 <= min(subtree_end)

With a sliding window, a full block also needs max(positions of queries) - min(positions of keys) < window, and one in
which some query may see some key min(positions of queries) - max(positions of keys) < window. Where the nearest
positions lie on different branches, such a block is computed though it is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from art.errors import TrainingError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


MAX_GRAPHS = 32
"""Most graphs that a compiled function may have. A model uses two of each."""


@dataclass(frozen=True, slots=True)
class FlexKind:
    """What is fixed in a compiled function."""

    window: int | None
    """Sliding window, which is a number in the code of the block mask's rule."""
    scale: float
    needs_grad: bool
    returns_lse: bool
    """Whether the log-sum-exp of the scores is returned too, for sinks."""


def run_flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, kind: FlexKind, *, compiles: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with a block mask: output [1, H, T, E], and the log-sum-exp [1, H, T] if `kind` asks for it.

    query [1, H, T, D], key [1, G, T, D], value [1, G, T, E]. Without `compiles` all scores are materialised, which
    suits only small layouts.

    Raises:
        TrainingError: torch did not compile the function, or compiled it more than `MAX_GRAPHS` times.
    """
    # torch compiles once more for each combination of inputs that require a gradient and of inputs that are views. So
    # all three require one or none does, and none is a view.
    query, key, value = (
        _Plain.apply(x) if x.requires_grad and kind.needs_grad else x.detach().requires_grad_(kind.needs_grad)
        for x in (query, key, value)
    )
    with torch.set_grad_enabled(kind.needs_grad):
        if not compiles:
            return _call_flex(query, key, value, mask, kind)
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit

        try:
            with config.patch(recompile_limit=MAX_GRAPHS):
                return compiled_function(kind)(query, key, value, mask)
        except FailOnRecompileLimitHit as error:  # `fullgraph` makes it an error
            raise TrainingError(
                f"torch compiled FlexAttention {MAX_GRAPHS} times for layers with window {kind.window}, and each time "
                "for other shapes or flags; expected about 2. Run with TORCH_LOGS=recompiles to see what changes, and "
                "report it"
            ) from error


@cache
def compiled_function(kind: FlexKind) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the compiled function of a kind. Compilation happens when it is called."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
        if not torch.compiler.is_compiling():  # the compiler leaves this branch out
            raise TrainingError(
                "FlexAttention ran without being compiled, which would materialise all attention scores. Something "
                "turned torch.compile off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE or torch.compiler.set_stance): "
                "remove it"
            )
        return _call_flex(query, key, value, mask, kind)

    # torch counts graphs by code object, which all closures of `attend` share; the name appears in torch's logs.
    name = f"flex_window_{kind.window}_{'grad' if kind.needs_grad else 'no_grad'}"
    attend.__code__ = attend.__code__.replace(co_name=name)
    function: Callable[..., tuple[Tensor, Tensor | None]] = torch.compile(attend, fullgraph=True)
    return function


class _Plain(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """Return a tensor with the same memory that autograd does not take for a view of another tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _call_flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, kind: FlexKind
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    options: dict[str, Any] = {"block_mask": mask, "scale": kind.scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if not kind.returns_lse:
        return flex_attention(query, key, value, **options), None
    out, aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True), **options)
    return out, aux.lse


BLOCK_SIZE = 128
"""FlexAttention's own default, in tokens, for queries and keys."""


def make_block_mask(
    positions: Tensor, subtree_end: Tensor, window: int | None, *, block_size: int = BLOCK_SIZE
) -> BlockMask:
    """Make the block mask of a layout on its device. With a window it may have more blocks than `create_block_mask`'s.

    `positions` and `subtree_end` are [T]. With B = `block_size`, memory and time are O((T/B)^2). `create_block_mask`
    needs [T, T] booleans: 4 GB at 65,536 tokens.
    """
    from torch.nn.attention.flex_attention import BlockMask

    some, every = classify_blocks(positions, subtree_end, window, block_size=block_size)
    lists = []  # FlexAttention's form: how many key blocks each query block has, and their indices, first the true ones
    for blocks in (some & ~every, every):
        indices = torch.argsort(blocks.int(), dim=1, descending=True, stable=True)
        lists += [blocks.sum(1, dtype=torch.int32)[None, None], indices.int()[None, None]]
    rule = flex_rule(positions.int(), subtree_end.int(), window)
    size = len(positions)
    mask: BlockMask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block_size, mask_mod=rule, seq_lengths=(size, size))
    return mask


def flex_rule(positions: Tensor, subtree_end: Tensor, window: int | None) -> Callable[..., Tensor]:
    """Return the prefix tree's attention rule as a function of single indices, the form that FlexAttention expects."""

    def rule(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = (k <= q) & (q < subtree_end[k])
        if window is not None:
            allowed = allowed & (positions[q] - positions[k] < window)
        return allowed

    return rule


def classify_blocks(
    positions: Tensor, subtree_end: Tensor, window: int | None, *, block_size: int
) -> tuple[Tensor, Tensor]:
    """Tell for each block of queries and each of keys whether some query may see some key, and whether every one every.

    Returns:
        Two tensors [N, N] of booleans, blocks of queries by blocks of keys, where N is T / `block_size`, rounded up.
    """
    # Fill the last block with tokens that see only themselves.
    size = len(positions)
    added = torch.arange(size, size + -size % block_size, device=positions.device)
    positions, subtree_end = pad(positions, (0, len(added))), torch.cat([subtree_end, added + 1])
    num_blocks = len(positions) // block_size
    start = torch.arange(num_blocks, device=positions.device) * block_size
    is_before = start[None, :] < start[:, None]
    ends = subtree_end.view(num_blocks, block_size)
    some = is_before & (ends.amax(1)[None, :] > start[:, None])
    every = is_before & (ends.amin(1)[None, :] >= start[:, None] + block_size)
    if window is not None:
        depths = positions.view(num_blocks, block_size)
        every &= depths.amax(1)[:, None] - depths.amin(1)[None, :] < window
        some &= depths.amin(1)[:, None] - depths.amax(1)[None, :] < window
    some.fill_diagonal_(True)  # every token sees itself
    return some, every
