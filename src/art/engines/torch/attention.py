"""Attention of a packed, ragged batch over the KV cache.

A step computes N tokens of many sequences at once. Sequences that add one token (decoding) are attended together, one
batched call per pool; a sequence that adds several (a prompt) is attended by itself. Query heads that share a key head
are treated as several queries of one head, so keys are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from art.engines.torch.kv_cache import Pool

NAME = "art_engine"
"""The name of this attention in transformers' registries."""

_MAX_MASK_ELEMENTS = 1 << 22
_DENSE_GAIN = 1.3
"""Attending unused rows in between is cheaper than gathering the used ones up to this ratio of rows."""


@dataclass(slots=True)
class Write:
    """Where the new keys and values of one pool go."""

    pool: Pool
    tokens: slice | Tensor  # into the batch
    rows: Tensor  # [n]
    positions: Tensor  # [n]


@dataclass(slots=True)
class DecodeGroup:
    """Sequences of one pool that add one token each."""

    pool: Pool
    tokens: slice | Tensor  # into the batch
    rows: Tensor | slice  # rows to gather, or a range of rows to view
    spread: Tensor | None  # [n] for a range with gaps: where in the range each query goes
    num_keys: int
    mask: Tensor | None  # [rows, 1, 1, num_keys], 0 or -inf


@dataclass(slots=True)
class PrefillSegment:
    """Tokens `[start, end)` of the batch continue a sequence at `offset`; without a pool they are all of it."""

    start: int
    end: int
    offset: int = 0
    pool: Pool | None = None
    row: int = 0


@dataclass(slots=True)
class AttentionPlan:
    """All that the layers of one step need to know."""

    writes: list[Write] = field(default_factory=list)
    decode: list[DecodeGroup] = field(default_factory=list)
    prefill: list[PrefillSegment] = field(default_factory=list)
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)


def decode_group(
    pool: Pool,
    tokens: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    like: Tensor,
) -> DecodeGroup:
    """Plan the attention of tokens `tokens` [n] of the batch, which are at `positions` [n] of the slots `rows` [n]."""
    low, high = int(rows.min()), int(rows.max()) + 1
    num_keys = int(positions.max()) + 1
    lengths = positions + 1
    row_index: Tensor | slice
    spread: Tensor | None = None
    if high - low <= len(rows) * _DENSE_GAIN:
        row_index = slice(low, high)
        local = rows - low
        if high - low != len(rows) or (np.diff(local) != 1).any():
            spread = to_device(local, like)
        lengths = np.ones(high - low, dtype=np.int64)  # a row in a gap attends to one key: its result is not read
        lengths[local] = positions + 1
    else:
        row_index = to_device(rows, like)
    mask = None
    if int(lengths.min()) < num_keys:
        hidden = torch.from_numpy(np.arange(num_keys) >= lengths[:, None]).to(like.device)
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -math.inf)
        mask = mask[:, None, None, :]
    return DecodeGroup(pool, slice_or_index(tokens, like), row_index, spread, num_keys, mask)


def slice_or_index(values: npt.NDArray[np.int64], like: Tensor) -> slice | Tensor:
    """A slice if `values` are consecutive, which spares a copy, else an index tensor."""
    first, last = int(values[0]), int(values[-1])
    if last - first + 1 == len(values) and (np.diff(values) == 1).all():
        return slice(first, last + 1)
    return to_device(values, like)


def to_device(values: npt.NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def attend(plan: AttentionPlan, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [N, heads, d], k and v [N, kv heads, d] -> [N, heads, d]. Stores the new keys and values first."""
    for write in plan.writes:
        write.pool.keys[layer][write.rows, :, write.positions] = k[write.tokens]
        write.pool.values[layer][write.rows, :, write.positions] = v[write.tokens]
    if len(plan.decode) == 1 and not plan.prefill and isinstance(plan.decode[0].tokens, slice):
        return _decode(plan.decode[0], layer, q, scale)
    out = torch.empty_like(q)
    for group in plan.decode:
        out[group.tokens] = _decode(group, layer, q[group.tokens], scale)
    for segment in plan.prefill:
        _prefill(plan, segment, layer, q, k, v, scale, out)
    return out


def _decode(group: DecodeGroup, layer: int, q: Tensor, scale: float) -> Tensor:
    """[n, heads, d] -> [n, heads, d]"""
    _, num_heads, d = q.shape
    keys, values = group.pool.keys[layer], group.pool.values[layer]
    if isinstance(group.rows, slice):
        keys, values = keys[group.rows, :, : group.num_keys], values[group.rows, :, : group.num_keys]
    else:
        keys = keys[:, :, : group.num_keys].index_select(0, group.rows)
        values = values[:, :, : group.num_keys].index_select(0, group.rows)
    if group.spread is not None:
        q = q.new_zeros((keys.shape[0], num_heads, d)).index_copy_(0, group.spread, q)
    num_kv_heads = keys.shape[1]
    q = q.reshape(-1, num_kv_heads, num_heads // num_kv_heads, d)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask, scale=scale).reshape(-1, num_heads, d)
    return out if group.spread is None else out.index_select(0, group.spread)


def _prefill(
    plan: AttentionPlan, s: PrefillSegment, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor
) -> None:
    queries = q[s.start : s.end].transpose(0, 1)[None]  # [1, heads, n, d]
    if s.pool is None or s.offset == 0:
        keys = k[s.start : s.end].transpose(0, 1)[None]
        values = v[s.start : s.end].transpose(0, 1)[None]
        result = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        out[s.start : s.end] = result[0].transpose(0, 1)
        return
    num_tokens = s.end - s.start
    block = max(16, _MAX_MASK_ELEMENTS // (s.offset + num_tokens))  # bounds the size of a mask
    for first in range(0, num_tokens, block):
        last = min(first + block, num_tokens)
        num_keys = s.offset + last
        mask = _causal_mask(plan, s.offset + first, last - first, num_keys, q)
        result = F.scaled_dot_product_attention(
            queries[:, :, first:last],
            s.pool.keys[layer][None, s.row, :, :num_keys],
            s.pool.values[layer][None, s.row, :, :num_keys],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        out[s.start + first : s.start + last] = result[0].transpose(0, 1)


def _causal_mask(plan: AttentionPlan, offset: int, num_queries: int, num_keys: int, like: Tensor) -> Tensor:
    """[num_queries, num_keys], 0 where key j <= offset + i, else -inf. Kept for the next layers while masks are few."""
    key = (offset, num_queries, num_keys)
    if (mask := plan.masks.get(key)) is None:
        mask = torch.full((num_queries, num_keys), -math.inf, dtype=like.dtype, device=like.device).triu_(offset + 1)
        if sum(m.numel() for m in plan.masks.values()) < _MAX_MASK_ELEMENTS:
            plan.masks[key] = mask
    return mask


class Probe:
    """Watches a trial forward pass: what the layers ask of attention beyond what `attend` computes."""

    def __init__(self, max_context: int) -> None:
        self.key_shapes: dict[int, tuple[int, int]] = {}
        """Per layer: key heads, head dimension."""
        self.problems: set[str] = set()
        self._max_context = max_context

    def see(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        if key.shape != value.shape or key.shape[-2] != query.shape[-2]:
            self.problems.add(f"keys of shape {list(key.shape)} with values of shape {list(value.shape)}")
        for name in ("softcap", "s_aux", "position_bias"):
            if kwargs.get(name) is not None:
                self.problems.add(f"attention with `{name}`")
        window = kwargs.get("sliding_window")
        if window is not None and window < self._max_context:
            self.problems.add(f"a sliding window of {window} in a context of {self._max_context} tokens")
        self.key_shapes[layer] = (key.shape[1], key.shape[-1])


def hf_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    art_plan: AttentionPlan,
    art_probe: Probe | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """This attention behind transformers' interface: query [1, heads, N, d] -> [1, N, heads, d]."""
    if art_probe is not None:
        art_probe.see(module.layer_idx, query, key, value, kwargs)
        if art_probe.problems:
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attend(art_plan, module.layer_idx, q, k, v, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return out[None], None


def hf_mask(*_args: Any, **_kwargs: Any) -> None:
    """Transformers needs no mask of ours: `AttentionPlan` says who attends to whom."""


def no_cache_plan(lengths: Sequence[int]) -> AttentionPlan:
    """Several whole sequences, packed one after the other, that leave nothing in the cache."""
    ends = np.cumsum(lengths).tolist()
    return AttentionPlan(prefill=[PrefillSegment(start=end - n, end=end) for end, n in zip(ends, lengths, strict=True)])
