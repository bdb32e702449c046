"""Attention of a packed batch over the KV cache.

A step computes N tokens of many sequences. Sequences that add one token (decoding) are computed together, in one
batched call per pool. A sequence that adds several tokens (a prompt) is computed by itself. Query heads that share a
key head are treated as several queries of one head, so keys are never repeated. The cache keeps the keys of all tokens
even if a layer has a sliding window; masks hide the older ones.

On a CPU, the keys of a prefix that decoding sequences have in common are read once for all of them, and those after it
row by row. A softmax over both parts is the average of the softmaxes over each, weighted by the sums of their
exponentials, so this is exact up to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from art.engines.torch.kv_cache import Ints, LayerShape, Pool, SharedPrefixes

NAME = "art_engine"
"""The name of this attention in transformers' registries."""

_MAX_MASK_ELEMENTS = 1 << 22
_DENSE_GAIN = 1.3
"""Up to this ratio of all rows to used rows, computing unused rows too is faster than gathering the used ones."""


@dataclass(frozen=True, slots=True)
class AttentionFormula:
    """Parameters of the attention formula in one layer."""

    scale: float
    window: int | None = None
    """A query sees its own token and the `window - 1` before it. `None`: it sees all."""
    sinks: Tensor | None = None
    """[heads] logits that take part in the softmax and have no value (gpt-oss)."""


@dataclass(slots=True)
class Write:
    """Where one pool of the KV cache stores the keys and values of a batch's tokens."""

    pool: Pool
    tokens: slice | Tensor  # indices into the batch
    rows: Tensor  # [n]
    positions: Tensor  # [n]


@dataclass(slots=True)
class DecodeGroup:
    """Plan of the attention for sequences in one pool of the KV cache that add one token each (decoding)."""

    pool: Pool
    tokens: slice | Tensor  # indices into the batch
    rows: Tensor | slice  # rows to gather, or a range of rows to view
    spread: Tensor | None  # [n] for a range with gaps: index in the range of each query
    num_keys: int
    lengths: Ints  # [rows] number of keys in each row
    shared: SharedPrefixes | None = None
    """A prefix whose keys are read once, where every query sees all of it; each query is a member."""
    masks: dict[tuple[int | None, int], tuple[int, Tensor | None]] = field(default_factory=dict)

    def seen(self, window: int | None, start: int, like: Tensor) -> tuple[int, Tensor | None]:
        """Return the first key from `start` on that any row sees, and the mask [rows, 1, 1, keys], 0 or -inf.

        `None` instead of a mask says that every row sees all of these keys.
        """
        key = window, start
        if key not in self.masks:
            starts = np.full(1, start) if window is None else np.maximum(start, self.lengths - window)
            first = max(0, int(starts.min()))
            keys = np.arange(first, self.num_keys)
            hidden = (keys >= self.lengths[:, None]) | (keys < starts[:, None])
            mask = None
            if hidden.any():
                mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
                mask.masked_fill_(torch.from_numpy(hidden).to(like.device), -math.inf)
            self.masks[key] = first, None if mask is None else mask[:, None, None, :]
        return self.masks[key]


@dataclass(slots=True)
class PrefillSegment:
    """Tokens `[start, end)` of the batch, which continue the sequence in row `row` of `pool` at position `offset`.

    Without a pool they are a whole sequence.
    """

    start: int
    end: int
    offset: int = 0
    pool: Pool | None = None
    row: int = 0


@dataclass(slots=True)
class AttentionPlan:
    """Plan of the attention in one forward pass: what to store in the KV cache, and which keys each query sees."""

    writes: list[Write] = field(default_factory=list)
    decode: list[DecodeGroup] = field(default_factory=list)
    prefill: list[PrefillSegment] = field(default_factory=list)
    masks: dict[tuple[int, int, int, int | None], Tensor] = field(default_factory=dict)


def decode_groups(pool: Pool, tokens: Ints, rows: Ints, positions: Ints, like: Tensor) -> list[DecodeGroup]:
    """Plan the attention of sequences that add one token each: those that share a prefix, and the others.

    Their tokens have the indices `tokens` [n] in the batch, and are at `positions` [n] of rows `rows` [n] of `pool`.
    """
    shared = pool.shared_prefixes(rows, positions)
    if shared is None:
        return [_decode_group(pool, tokens, rows, positions, like)]
    others = np.delete(np.arange(len(rows)), shared.members)
    parts = [(shared, shared.members), (None, others)] if len(others) else [(shared, shared.members)]
    return [_decode_group(pool, tokens[part], rows[part], positions[part], like, sharing) for sharing, part in parts]


def _decode_group(
    pool: Pool, tokens: Ints, rows: Ints, positions: Ints, like: Tensor, shared: SharedPrefixes | None = None
) -> DecodeGroup:
    low, high = int(rows.min()), int(rows.max()) + 1
    lengths, num_keys = positions + 1, int(positions.max()) + 1
    row_index: Tensor | slice
    spread = None
    if high - low <= len(rows) * _DENSE_GAIN:
        row_index = slice(low, high)
        if high - low != len(rows) or (np.diff(rows) != 1).any():
            spread = to_device(rows - low, like)
        lengths = np.full(high - low, positions.min() + 1)  # rows in gaps see some keys; their results are not read
        lengths[rows - low] = positions + 1
    else:
        row_index = to_device(rows, like)
    return DecodeGroup(pool, slice_or_index(tokens, like), row_index, spread, num_keys, lengths, shared)


def slice_or_index(values: Ints, like: Tensor) -> slice | Tensor:
    """Return `values` as a slice if they are consecutive, which avoids a copy, else as an index tensor."""
    first, last = int(values[0]), int(values[-1])
    if last - first + 1 == len(values) and (np.diff(values) == 1).all():
        return slice(first, last + 1)
    return to_device(values, like)


def to_device(values: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def attend(plan: AttentionPlan, layer: int, q: Tensor, k: Tensor, v: Tensor, formula: AttentionFormula) -> Tensor:
    """Store keys and values in the cache, then attend: q [N, heads, d], k [N, kv heads, d], v [N, kv heads, e] ->
    [N, heads, e]."""
    for write in plan.writes:
        write.pool.keys[layer][write.rows, :, write.positions] = k[write.tokens]
        write.pool.values[layer][write.rows, :, write.positions] = v[write.tokens]
    if len(plan.decode) == 1 and not plan.prefill and isinstance(plan.decode[0].tokens, slice):
        return _decode(plan.decode[0], layer, q, formula)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    for group in plan.decode:
        out[group.tokens] = _decode(group, layer, q[group.tokens], formula)
    for segment in plan.prefill:
        new = slice(segment.start, segment.end)
        keys, values = k[new].transpose(0, 1), v[new].transpose(0, 1)
        if segment.pool is not None and segment.offset:
            keys, values = segment.pool.keys[layer][segment.row], segment.pool.values[layer][segment.row]
        out[new] = _prefill(plan, segment.offset, q[new], keys, values, formula)
    return out


def _decode(group: DecodeGroup, layer: int, q: Tensor, formula: AttentionFormula) -> Tensor:
    """Attention of a decode group: [n, heads, d] -> [n, heads, e]."""
    num_heads, queries = q.shape[1], q
    all_keys, all_values = group.pool.keys[layer], group.pool.values[layer]
    window = None if formula.window is None or group.num_keys <= formula.window else formula.window
    shared = group.shared if window is None and formula.sinks is None else None
    first, mask = group.seen(window, 0 if shared is None else shared.length, q)
    keys, values = (x[:, :, first : group.num_keys] for x in (all_keys, all_values))
    if isinstance(group.rows, slice):
        keys, values = keys[group.rows], values[group.rows]
    else:
        keys, values = keys.index_select(0, group.rows), values.index_select(0, group.rows)
    if group.spread is not None:  # the range has rows that nobody asked for: leave room for their queries
        q = q.new_zeros((keys.shape[0], *q.shape[1:])).index_copy_(0, group.spread, q)
    if formula.sinks is not None:
        out = _attend_with_sinks(q[:, :, None], keys, values, mask, formula.scale, formula.sinks)[:, :, 0]
        return out if group.spread is None else out.index_select(0, group.spread)
    # Query heads that share a key head become several queries of that head.
    q = q.reshape(-1, keys.shape[1], num_heads // keys.shape[1], q.shape[-1])
    if shared is None:
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=formula.scale)
        out = out.reshape(-1, num_heads, values.shape[-1])
        return out if group.spread is None else out.index_select(0, group.spread)
    out, log_sum = _attend_with_sum(q, keys, values, mask, formula.scale)
    out, log_sum = out.reshape(-1, num_heads, values.shape[-1]), log_sum.reshape(-1, num_heads)
    if group.spread is not None:
        out, log_sum = out.index_select(0, group.spread), log_sum.index_select(0, group.spread)
    prefix_out, prefix_log_sum = _attend_to_prefixes(shared, queries, all_keys, all_values, formula.scale)
    weight = (prefix_log_sum - log_sum).sigmoid_()  # the share of the prefix in the sum over all keys
    return torch.lerp(out, prefix_out, weight[..., None].to(out.dtype))


def _attend_to_prefixes(
    shared: SharedPrefixes, q: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each member over its prefix: q [n, heads, d], keys and values [rows, kv heads, capacity, d] ->
    [n, heads, d] and the log of the sum of exponentials [n, heads]."""
    num_groups, num_heads, num_kv_heads = len(shared.rows), q.shape[1], keys.shape[1]
    keys, values = (x[:, :, : shared.length].index_select(0, shared.rows) for x in (keys, values))
    # [groups * places, heads, d] -> [groups, kv heads, places * heads per kv head, d]
    q = q.index_select(0, shared.queries).view(num_groups, -1, num_kv_heads, num_heads // num_kv_heads, q.shape[2])
    out, log_sum = _attend_with_sum(q.transpose(1, 2).flatten(2, 3), keys, values, None, scale)
    by_place = num_groups, num_kv_heads, -1, num_heads // num_kv_heads
    out = out.reshape(*by_place, out.shape[-1]).transpose(1, 2).reshape(-1, num_heads, out.shape[-1])
    log_sum = log_sum.reshape(by_place).transpose(1, 2).reshape(-1, num_heads)
    return out.index_select(0, shared.places), log_sum.index_select(0, shared.places)


def _attend_with_sum(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention on the CPU [B, heads, n, d], and the log of the sum of exponentials [B, heads, n]."""
    flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sum = flash_attention(q, keys, values, attn_mask=mask, scale=scale)
    return out, log_sum


def _prefill(
    plan: AttentionPlan, offset: int, q: Tensor, keys: Tensor, values: Tensor, formula: AttentionFormula
) -> Tensor:
    """Attention of a sequence from token `offset` on: q [n, heads, d], keys [kv heads, length, d] -> [n, heads, e]."""
    queries, keys, values = q.transpose(0, 1)[None], keys[None], values[None]
    num_tokens, window, scale, sinks = len(q), formula.window, formula.scale, formula.sinks
    if offset == 0 and sinks is None and (window is None or num_tokens <= window):
        result = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        return result[0].transpose(0, 1)
    results = []
    # Compute some queries at once, which limits the size of the mask, and with sinks of the scores.
    block = max(16, _MAX_MASK_ELEMENTS // ((offset + num_tokens) * (1 if sinks is None else len(sinks))))
    block = block if window is None else min(block, max(64, window))
    for first in range(0, num_tokens, block):
        last = min(first + block, num_tokens)
        first_key = 0 if window is None else max(0, offset + first + 1 - window)
        seen = slice(first_key, offset + last)
        mask = _causal_mask(plan, offset + first - first_key, last - first, seen.stop - first_key, window, q)
        block_of = queries[:, :, first:last], keys[:, :, seen], values[:, :, seen]
        if sinks is None:
            results.append(F.scaled_dot_product_attention(*block_of, attn_mask=mask, scale=scale, enable_gqa=True))
        else:
            results.append(_attend_with_sinks(*block_of, mask, scale, sinks))
    return torch.cat(results, dim=2)[0].transpose(0, 1)


def _attend_with_sinks(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, sinks: Tensor
) -> Tensor:
    """Attention with sinks: q [B, heads, n, d], keys [B, kv heads, L, d], values [B, kv heads, L, e] ->
    [B, heads, n, e].

    Computed in float32. The softmax of a head includes its sink, which has no value, so weights sum to less than 1.
    """
    num_kv_heads = keys.shape[1]
    scores = q.float().unflatten(1, (num_kv_heads, -1)).flatten(2, 3) @ keys.float().transpose(-1, -2)
    scores = scores.mul_(scale).view(*q.shape[:3], -1)  # [B, heads, n, L]
    if mask is not None:
        scores += mask
    # The sink is one more logit in the sum of exponentials, without a value of its own.
    total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks.float()[:, None, None])
    weights = scores.sub_(total).exp_().unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    return (weights @ values.float()).view(*q.shape[:3], -1).to(q.dtype)


def _causal_mask(
    plan: AttentionPlan, offset: int, num_queries: int, num_keys: int, window: int | None, like: Tensor
) -> Tensor:
    """A mask [num_queries, num_keys]: 0 where query i sees key j, offset + i - window < j <= offset + i, else -inf.

    Masks are cached for the next layers, up to `_MAX_MASK_ELEMENTS`.
    """
    key = (offset, num_queries, num_keys, window)
    if (mask := plan.masks.get(key)) is None:
        mask = torch.full((num_queries, num_keys), -math.inf, dtype=like.dtype, device=like.device).triu_(offset + 1)
        if window is not None:
            mask += torch.full_like(mask, -math.inf).tril_(offset - window)
        if sum(m.numel() for m in plan.masks.values()) < _MAX_MASK_ELEMENTS:
            plan.masks[key] = mask
    return mask


class AttentionProbe:
    """Records, in a trial forward pass, what the layers need from attention, and what `attend` does not support."""

    def __init__(self) -> None:
        self.kv_shapes: dict[int, LayerShape] = {}
        """Shape of keys and values, by layer."""
        self.windows: dict[int, int | None] = {}
        """Sliding window, if any, by layer."""
        self.problems: set[str] = set()

    def see(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        if key.shape[:-1] != value.shape[:-1] or key.shape[-2] != query.shape[-2]:
            self.problems.add(f"keys of shape {list(key.shape)} with values of shape {list(value.shape)}")
        for name in ("softcap", "position_bias"):
            if kwargs.get(name) is not None:
                self.problems.add(f"attention with `{name}`")
        self.kv_shapes[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        self.windows[layer] = kwargs.get("sliding_window")


def hf_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    art_plan: AttentionPlan,
    art_probe: AttentionProbe | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Call `attend`, with the signature that transformers requires: query [1, heads, N, d] -> [1, N, heads, e]."""
    if art_probe is not None:
        art_probe.see(module.layer_idx, query, key, value, kwargs)
        if art_probe.problems:
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    formula = AttentionFormula(scale, window=kwargs.get("sliding_window"), sinks=kwargs.get("s_aux"))
    return attend(art_plan, module.layer_idx, q, k, v, formula)[None], None


def hf_mask(*_args: Any, **_kwargs: Any) -> None:
    """Return no mask to transformers, because `AttentionPlan` says which keys a query sees."""
