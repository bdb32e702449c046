"""Attention over a prefix tree, through transformers' own attention interface.

Every kernel computes the same rule, query q attends key k iff k <= q < subtree_end[k]:

    dense    scaled-dot-product attention with the rule as a boolean mask: the reference, and fast for small layouts
    blocks   for the CPU: some queries at a time, with the keys that at least one of them attends
             (`art.trainer.block_attention`)
    flex     FlexAttention with a block mask, for CUDA
    own      none of these: the model's own attention, for layouts of whole sequences

A layer may add a sliding window to the rule, and sinks to the softmax (gpt-oss): see `AttentionFormula`.
`art.trainer.step.micro_batch` chooses the kernel of a layout.

The model is loaded with `attn_implementation=ATTENTION_NAME` and called with `tree_layout=TreeLayout(...)`. Every layer
passes that keyword argument on to the attention function.

A layer can be checkpointed without its attention. `torch.utils.checkpoint` runs a layer's forward pass a second time
for the tensors that the backward pass needs. Under the contexts of `keep_attention` the attention's own tensors are
kept from the first time, and its output is used again in the second. So the longest part at long contexts runs once,
whatever kernel computes it.

torch.compile makes a graph of FlexAttention for each set of shapes and flags that it meets and counts them. Above the
limit (8 by default) torch runs the function uncompiled and only logs a warning; FlexAttention then materialises all
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

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from art.errors import ConfigError, TrainingError
from art.trainer.block_attention import attend_in_blocks, split_queries
from art.trainer.tree import IntArray, PrefixTree

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(slots=True)
class _Kept:
    """Outputs of the attention in one checkpointed layer, in the order of its calls."""

    outputs: list[Tensor] = field(default_factory=list)
    num_used: int | None = None
    """How many outputs the second forward pass has used; `None` during the first."""


_current: ContextVar[_Kept | None] = ContextVar("kept_attention", default=None)


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for the first and the second forward pass: a `context_fn` of `torch.utils.checkpoint`."""
    kept = _Kept()
    return _using(kept, replays=False), _using(kept, replays=True)


def attend_once(compute: Callable[[], Tensor]) -> Tensor:
    """Return `compute()`, or in the second forward pass of a checkpointed layer what it returned in the first."""
    kept = _current.get()
    if kept is None:
        return compute()
    if kept.num_used is not None:
        out = kept.outputs[kept.num_used]
        kept.num_used += 1
        return out.detach().requires_grad_(out.requires_grad)
    # These hooks hide those of the checkpoint, so that what the attention saves is kept and not computed again.
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        out = compute()
    kept.outputs.append(out.detach().requires_grad_(out.requires_grad))
    return out


@contextlib.contextmanager
def _using(kept: _Kept, *, replays: bool) -> Iterator[None]:
    kept.num_used = 0 if replays else None
    token = _current.set(kept)
    try:
        yield
    finally:
        _current.reset(token)


ATTENTION_NAME = "art_prefix_tree"
KernelName = Literal["dense", "blocks", "flex", "own"]

_UNSUPPORTED = ("softcap", "position_bias")
"""Attention features that change the formula. No kernel here computes them."""

_LENGTHS_PER_OCTAVE: Final = 32
_MIN_LENGTH: Final = 512
"""Shortest layout for flex."""

_SINK_WIDTH = 8
"""Columns that sinks add to each head: fast kernels need a head size that is a multiple of 8."""


@dataclass(frozen=True, slots=True)
class AttentionFormula:
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
    kernel: KernelName
    num_padding: int = 0
    """Number of tokens at the end that belong to no sequence. They see only themselves, and nothing sees them."""
    derived: dict[Any, Any] = field(default_factory=dict)
    """Masks by (kernel, window), cached by the first layer that needs them."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the tree, without padding."""
        return len(self.token_ids) - self.num_padding


def make_layout(tree: PrefixTree, *, device: torch.device, kernel: KernelName) -> TreeLayout:
    """Copy `tree` to `device`, with what the attention kernel needs. For flex it is padded to `padded_length`."""
    size = len(tree)
    num_padding = padded_length(size) - size if kernel == "flex" else 0

    def padded(values: IntArray, padding: IntArray) -> Tensor:
        return torch.from_numpy(np.concatenate([values, padding]) if num_padding else values).to(device)

    zeros = np.zeros(num_padding, dtype=np.int64)
    return TreeLayout(
        token_ids=padded(tree.token_ids, zeros),
        positions=padded(tree.positions, zeros),
        subtree_end=padded(tree.subtree_end, np.arange(size, size + num_padding) + 1),
        kernel=kernel,
        num_padding=num_padding,
    )


def padded_length(num_tokens: int) -> int:
    """Round `num_tokens` up to a length for flex: a multiple of 128 up to 8,192, then of 1/64 to 1/32 of the length.

    So whole blocks are computed, lengths recur, and padding is at most 127 tokens or 1/32 of the layout, the larger of
    the two. Shorter layouts than 512 become 512: torch compiles small numbers of blocks separately.
    """
    step = max(BLOCK_SIZE, (1 << num_tokens.bit_length() - 1) // _LENGTHS_PER_OCTAVE)
    return max(_MIN_LENGTH, -(-num_tokens // step) * step)


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
    if attention_mask is not None:
        raise ConfigError(f"{type(module).__name__} makes an attention mask of its own, which is not that of the tree")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} uses `{name}` in its attention, which the trainer does not compute"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    formula = AttentionFormula(scale, sliding_window, kwargs.get("s_aux"))
    return attend_once(lambda: KERNELS[tree_layout.kernel](query, key, value, tree_layout, formula)), None


def attend_dense(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, formula: AttentionFormula) -> Tensor:
    """Compute attention over a prefix tree with a [T, T] boolean mask. Memory and time are quadratic in T."""
    if (mask := layout.derived.get(("dense", formula.window))) is None:
        mask = dense_mask(layout.positions, layout.subtree_end, formula.window)
        layout.derived["dense", formula.window] = mask
    if (times := query.shape[1] // key.shape[1]) > 1:
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    if formula.sinks is not None:
        # A sink is one more key with value 0: [q, sink] . [0, 1] is the sink, and [q, sink] . [k, 0] is q . k.
        sinks = (formula.sinks / formula.scale)[:, None]
        columns = pad(sinks, (0, _SINK_WIDTH - 1))[None, :, None].to(query.dtype)  # [1, H, 1, width]
        query = torch.cat([query, columns.expand(-1, -1, query.shape[2], -1)], dim=-1)
        size = key.shape[-1]
        key, value = pad(key, (0, _SINK_WIDTH, 0, 1)), pad(value, (0, 0, 0, 1))
        key[:, :, -1, size] = 1
        mask = pad(mask, (0, 1), value=True)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=formula.scale).transpose(1, 2)


def dense_mask(positions: Tensor, subtree_end: Tensor, window: int | None) -> Tensor:
    """Make the prefix tree's attention mask, [T, T] booleans, queries by keys.

    A query sees its ancestors and itself; with `window`, only keys that are at most `window - 1` positions back.
    """
    index = torch.arange(len(subtree_end), device=subtree_end.device)
    mask = (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])
    if window is not None:
        mask &= positions[:, None] - positions[None, :] < window
    return mask


def attend_blocks(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, formula: AttentionFormula) -> Tensor:
    """Compute attention over a prefix tree, some queries at a time."""
    if (blocks := layout.derived.get(("blocks", formula.window))) is None:
        blocks = split_queries(layout.positions, layout.subtree_end, formula.window)
        layout.derived["blocks", formula.window] = blocks
    return attend_in_blocks(query, key, value, formula.sinks, blocks, formula.scale)


def attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    formula: AttentionFormula,
    *,
    compiles: bool | None = None,
) -> Tensor:
    """Compute attention over a prefix tree by torch's FlexAttention with a block mask.

    It is compiled on CUDA. Elsewhere it is not, unless `compiles` says so: see `run_flex`.
    """
    window, sinks = formula.window, formula.sinks
    if (mask := layout.derived.get(("flex", window))) is None:
        mask = make_block_mask(layout.positions, layout.subtree_end, window)
        layout.derived["flex", window] = mask
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    kind = FlexKind(window, formula.scale, needs_grad, returns_lse=sinks is not None)
    is_compiled = query.device.type == "cuda" if compiles is None else compiles
    out, lse = run_flex(query, key, value, mask, kind, compiles=is_compiled)
    if sinks is not None:  # attention without a sink, scaled down by the sink's share of the softmax
        assert lse is not None
        out = out * torch.sigmoid(lse - sinks.float()[:, None])[..., None].to(out.dtype)
    return out.transpose(1, 2)


# -- FlexAttention --


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


KERNELS: dict[KernelName, Callable[[Tensor, Tensor, Tensor, TreeLayout, AttentionFormula], Tensor]] = {
    "dense": attend_dense,
    "blocks": attend_blocks,
    "flex": attend_flex,
}
