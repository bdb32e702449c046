"""Softmax attention over a prefix tree on the CPU, some queries at a time: its plan, and one function that computes it.

In depth-first order neighbouring queries share most of their keys: the path from the root to the first of them. So a
block of queries needs few keys that only some of them see, and a mask no wider than what the block's own tokens add.
The scores of a block stay in the cache.

Rows are kept as [G, R, T, D]: key head, query head of that key head, place in the layout. So one matrix product per
block serves all query heads that share a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

QUERIES_AT_ONCE = 96
"""Queries of a block. Smaller ones need more calls, larger ones compute more scores in vain: 64 and 128 took up to a
tenth longer."""
_KEEP_BYTES = 2**26
"""Attention probabilities of a layer are kept for the backward pass up to this size. Above it they are recomputed."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """The N queries [start, end) of a layout, and the K keys that at least one of them attends."""

    start: int
    end: int
    runs: tuple[tuple[int, int], ...]
    """The keys, as runs [start, end) of the layout. Slices are copied and added several times faster than rows."""
    hidden: Tensor
    """[N, W] 0, or -inf where a query does not attend a key, of the last W keys; all queries attend the keys before."""

    is_chain: bool
    """Whether each query sees all tokens before it."""

    @property
    def num_scores(self) -> int:
        return (self.end - self.start) * sum(end - start for start, end in self.runs)

    def gather(self, rows: Tensor) -> Tensor:
        """Take the keys' rows from `rows` [G, T, D]; returns [G, K, D]."""
        parts = [rows[:, start:end] for start, end in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def scatter_add(self, total: Tensor, rows: Tensor) -> None:
        """Add `rows` [G, K, D] to `total` [G, T, D] where `gather` takes them from."""
        done = 0
        for start, end in self.runs:
            total[:, start:end] += rows[:, done : done + end - start]
            done += end - start


def split_queries(positions: Tensor, subtree_end: Tensor, window: int | None) -> list[QueryBlock]:
    """Split the queries of a layout into blocks. `positions` and `subtree_end` are [T]."""
    place, end_of = positions.numpy(), subtree_end.numpy()
    blocks = []
    for start in range(0, len(place), QUERIES_AT_ONCE):
        end = min(start + QUERIES_AT_ONCE, len(place))
        is_seen = end_of[:end] > start
        if window is not None:
            is_seen &= place[:end] > place[start:end].min() - window
        keys = np.flatnonzero(is_seen)
        breaks = [0, *(np.flatnonzero(np.diff(keys) != 1) + 1).tolist(), len(keys)]
        runs = tuple((int(keys[first]), int(keys[last - 1]) + 1) for first, last in pairwise(breaks))
        queries = np.arange(start, end)[:, None]
        attends = (keys <= queries) & (queries < end_of[keys])
        if window is not None:
            attends &= place[start:end, None] - place[keys] < window
        some_miss = np.flatnonzero(~attends.all(axis=0))
        first = int(some_miss[0]) if len(some_miss) else len(keys) - 1
        hidden = torch.zeros(end - start, len(keys) - first)
        hidden.masked_fill_(torch.from_numpy(~attends[:, first:]), -torch.inf)
        is_chain = window is None and place[end - 1] == end - 1  # so all tokens before are on its path from the root
        blocks.append(QueryBlock(start, end, runs, hidden, is_chain))
    return blocks


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, blocks: Sequence[QueryBlock], scale: float
) -> Tensor:
    """Compute attention in float32: each query sees the keys on its path from the root.

    query [1, H, T, D], key [1, G, T, D], value [1, G, T, E]; returns [1, T, H, E]. `sinks` [H] are logits that take
    part in the softmax and have no value.

    The tokens before the first branching are a plain causal sequence. Where it is long, as the prompt of a coding
    agent, torch's own kernel computes it: no score leaves the cache.
    """
    num_chain = sum(block.is_chain for block in blocks) if _bytes_of_scores(query, blocks) > _KEEP_BYTES else 0
    if sinks is not None or query.shape[-1] != value.shape[-1]:  # there torch would compute all scores at once
        num_chain = 0
    out: Tensor = _BlockAttention.apply(query[0], key[0], value[0], sinks, blocks[num_chain:], scale)[None]
    if not num_chain:
        return out
    end, times = blocks[num_chain - 1].end, query.shape[1] // key.shape[1]
    keys, values = (x[:, :, :end].float().repeat_interleave(times, dim=1) for x in (key, value))
    chain = scaled_dot_product_attention(query[:, :, :end].float(), keys, values, is_causal=True, scale=scale)
    return torch.cat([_WithoutZeros.apply(chain.transpose(1, 2)).to(query.dtype), out[:, end:]], dim=1)


def _bytes_of_scores(query: Tensor, blocks: Sequence[QueryBlock]) -> int:
    return 4 * int(query.shape[-3]) * sum(block.num_scores for block in blocks)


class _WithoutZeros(torch.autograd.Function):  # type: ignore[misc]  # as above
    """The identity. A gradient of 0 ends here, as that of a prompt in the last layer, whose outputs nothing uses."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor | None:
        return grads[0] if bool(grads[0].any()) else None


class _BlockAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """query [H, T, D], key [G, T, D], value [G, T, E] and optional sinks [H] give [T, H, E], 0 outside of `blocks`.

    The backward pass is that of softmax attention, block by block. A sink is a key whose value is 0, so its gradient dp
    is 0 too, and the formulas for the other keys do not change.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks: Sequence[QueryBlock],
        scale: float,
    ) -> Tensor:
        by_group = (len(key), -1)
        queries = query.float().mul(scale).unflatten(0, by_group)  # [G, R, T, D]
        key_rows, value_rows = key.float(), value.float()
        sink_rows = None if sinks is None else sinks.float().view(*by_group)  # [G, R]
        out = queries.new_zeros(*queries.shape[:-1], value.shape[-1])
        kept: list[Tensor] = []
        # Long contexts do not fit: then nothing is kept, and the backward pass computes all of them again.
        keeps = _bytes_of_scores(query, blocks) <= _KEEP_BYTES
        for block in blocks:
            own = slice(block.start, block.end)
            p = _probabilities(queries[:, :, own], block.gather(key_rows), block, sink_rows)
            out[:, :, own] = torch.bmm(p, block.gather(value_rows)).view_as(out[:, :, own])
            if keeps:
                kept.append(p)
        ctx.save_for_backward(queries, key_rows, value_rows, out, sink_rows, *kept)
        ctx.blocks, ctx.scale, ctx.dtypes = blocks, scale, (query.dtype, key.dtype, value.dtype)
        return out.flatten(0, 1).transpose(0, 1).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, key_rows, value_rows, out, sink_rows, *kept = ctx.saved_tensors
        grad_out = grads[0].float().transpose(0, 1).unflatten(0, (len(key_rows), -1))
        # The softmax's backward pass subtracts sum(p * dp) over a query's keys from dp. That sum is out . grad_out.
        dots = (out * grad_out).sum(-1, keepdim=True)
        grad_queries = torch.zeros_like(queries)
        grad_keys, grad_values = torch.zeros_like(key_rows), torch.zeros_like(value_rows)
        grad_sinks = None if sink_rows is None else torch.zeros_like(sink_rows)
        for number, block in enumerate(ctx.blocks):
            own = slice(block.start, block.end)
            if not grad_out[:, :, own].any():  # as above
                continue
            rows, douts, block_dots = (x[:, :, own].flatten(1, 2) for x in (queries, grad_out, dots))
            keys, values = block.gather(key_rows), block.gather(value_rows)
            p = kept[number] if kept else _probabilities(queries[:, :, own], keys, block, sink_rows)
            # out = p V and p = softmax(Q K^T) give dV = p^T dout, dp = dout V^T, dscores = p (dp - dots),
            # dQ = dscores K and dK = dscores^T Q.
            block.scatter_add(grad_values, torch.bmm(p.transpose(1, 2), douts))
            dscores = torch.bmm(douts, values.transpose(1, 2))
            if grad_sinks is not None:
                rest = (1 - p.sum(-1, keepdim=True)).mul_(block_dots)  # probability of the sink, times dot
                grad_sinks -= rest.view(*grad_sinks.shape, -1).sum(-1)
            dscores.sub_(block_dots).mul_(p)
            block.scatter_add(grad_keys, torch.bmm(dscores.transpose(1, 2), rows))
            grad_queries[:, :, own] = torch.bmm(dscores, keys).view_as(grad_queries[:, :, own])
        totals = (grad_queries.flatten(0, 1).mul_(ctx.scale), grad_keys, grad_values)
        by_input = (total.to(dtype) for total, dtype in zip(totals, ctx.dtypes, strict=True))
        return *by_input, None if grad_sinks is None else grad_sinks.flatten(), None, None


def _probabilities(queries: Tensor, keys: Tensor, block: QueryBlock, sinks: Tensor | None) -> Tensor:
    """Attention probabilities: queries [G, R, N, D] and keys [G, K, D] of a block give [G, R * N, K].

    With `sinks` [G, R] each row sums to less than 1.
    """
    scores = torch.bmm(queries.flatten(1, 2), keys.transpose(1, 2))
    by_query = scores.view(*queries.shape[:3], -1)
    by_query[..., -block.hidden.shape[1] :] += block.hidden
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    # The sink is one more term of the softmax's denominator, without a probability of its own here.
    total = torch.logaddexp(by_query.logsumexp(-1), sinks[:, :, None])
    return scores.sub_(total.view(*scores.shape[:2], 1)).exp_()
