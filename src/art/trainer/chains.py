"""Tree attention on CPU, chain by chain.

A chain of the layout is what one path adds to the paths before it: `n` tokens in a row, without branches, whose keys
are the path from the root. Attention of a chain is that of the last `n` tokens of an ordinary causal sequence. So the
work is the causal attention of the new tokens only, no mask wider than a block exists, and the loop is over paths and
not over the (many more) nodes of the tree.

Within a chain the queries go in blocks, so that a block sees no keys behind itself and its scores stay in the cache.
The heads that share keys are put below each other, which makes one matrix product per block of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art.trainer.tree import Chain

_BLOCK = 96
"""Queries per block. Measured: 64 to 128 are alike; smaller ones cost calls, larger ones compute masked scores."""

_KEEP_BYTES = 2**26
"""Attention probabilities are kept for the backward pass up to this size per layer, and recomputed above it."""


@dataclass(frozen=True, slots=True)
class ChainKeys:
    """A chain of a layout, and where its keys lie: runs of the layout, from the root to the chain's own tokens."""

    start: int
    end: int
    runs: tuple[tuple[int, int], ...]  # [start, end) each; the last ones hold the chain's own `end - start` tokens

    @property
    def num_keys(self) -> int:
        return sum(end - start for start, end in self.runs)


def make_chain_keys(chain: Chain) -> ChainKeys:
    """The runs of `chain.path`: few, as the path only jumps where it left a sibling out."""
    borders = np.flatnonzero(np.diff(chain.path) != 1) + 1
    runs = tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(chain.path, borders))
    return ChainKeys(start=chain.start, end=chain.end, runs=runs)


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries [start, end) of the layout against the keys [first, last) of the chain's path."""

    start: int
    end: int
    first: int
    last: int


def attend_chains(
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, G, T, D]
    value: Tensor,  # [1, G, T, D]
    chains: list[ChainKeys],
    scale: float,
    window: int | None,
) -> Tensor:
    """Attention of every chain's queries to their paths, computed in float32. Returns [1, T, H, D]."""
    num_heads, groups = query.shape[1], key.shape[1]
    grouped = (query[0].float() * scale).unflatten(0, (groups, num_heads // groups))
    out: Tensor = _ChainAttention.apply(
        grouped, *(x[0].float().transpose(0, 1).contiguous() for x in (key, value)), chains, window
    )
    return out.flatten(0, 1).transpose(0, 1).unsqueeze(0).to(query.dtype)


def _blocks(chain: ChainKeys, window: int | None) -> Iterator[_Block]:
    prefix = chain.num_keys - (chain.end - chain.start)
    for start in range(chain.start, chain.end, _BLOCK):
        end = min(start + _BLOCK, chain.end)
        first = 0 if window is None else max(0, prefix + start - chain.start - window + 1)
        yield _Block(start, end, first, prefix + end - chain.start)


def _probabilities(queries: Tensor, keys: Tensor, block: _Block, window: int | None) -> Tensor:
    """Softmax of the scores: queries [G, R * n, D] and keys [G, L, D] of a block give [G, R * n, L]."""
    scores = torch.bmm(queries, keys.transpose(1, 2))
    count, length = block.end - block.start, keys.shape[1]
    by_query = scores.view(len(scores), -1, count, length)
    by_query[..., length - count :] += _future(count)
    if window is not None:
        # Query i of the block stands at place last - count + i of the path.
        oldest = torch.arange(block.last - count, block.last) - window + 1
        too_old = torch.arange(block.first, block.last)[None, :] < oldest[:, None]
        by_query.masked_fill_(too_old, -torch.inf)
    return torch.softmax(scores, dim=-1)


@lru_cache(maxsize=_BLOCK)
def _future(count: int) -> Tensor:
    """[count, count] zeros on and below the diagonal, minus infinity above it."""
    return torch.full((count, count), -torch.inf).triu_(1)


class _ChainAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """Queries (scaled) [G, R, T, D], keys and values [T, G, D]; the output is [G, R, T, D].

    The backward pass is that of softmax attention, block by block, with probabilities kept or recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, chains: list[ChainKeys], window: int | None
    ) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        kept: list[Tensor] = []
        kept_bytes = 0
        for chain in chains:
            keys, values = (_gather(x, chain).transpose(0, 1) for x in (key, value))  # [G, L, D]
            for block in _blocks(chain, window):
                seen = slice(block.first, block.last)
                p = _probabilities(_rows(query, block), keys[:, seen], block, window)
                _set_rows(out, block, torch.bmm(p, values[:, seen]))
                kept_bytes += p.numel() * p.element_size()
                if kept_bytes <= _KEEP_BYTES:
                    kept.append(p)
        ctx.save_for_backward(query, key, value, out, *(kept if kept_bytes <= _KEEP_BYTES else ()))
        ctx.chains, ctx.window = chains, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *kept = ctx.saved_tensors
        grad_out = grads[0]
        # What the softmax's backward subtracts from dp: per query the sum over keys of p * dp, which is out . grad_out.
        dots = (out * grad_out).sum(-1, keepdim=True)
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        probabilities = iter(kept)
        for chain in ctx.chains:
            keys, values = (_gather(x, chain).transpose(0, 1) for x in (key, value))  # [G, L, D]
            dkeys, dvalues = keys.new_zeros(keys.shape), values.new_zeros(values.shape)
            for block in _blocks(chain, ctx.window):
                seen = slice(block.first, block.last)
                rows, douts = _rows(query, block), _rows(grad_out, block)
                p = next(probabilities) if kept else _probabilities(rows, keys[:, seen], block, ctx.window)
                dvalues[:, seen] += torch.bmm(p.transpose(1, 2), douts)
                dscores = torch.bmm(douts, values[:, seen].transpose(1, 2))
                dscores.sub_(_rows(dots, block)).mul_(p)
                dkeys[:, seen] += torch.bmm(dscores.transpose(1, 2), rows)
                _set_rows(grad_query, block, torch.bmm(dscores, keys[:, seen]))
            _scatter_add(grad_key, chain, dkeys.transpose(0, 1))
            _scatter_add(grad_value, chain, dvalues.transpose(0, 1))
        return grad_query, grad_key, grad_value, None, None


def _gather(x: Tensor, chain: ChainKeys) -> Tensor:
    """The rows [L, ...] of `x` [T, ...] on the chain's path."""
    parts = [x[start:end] for start, end in chain.runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scatter_add(total: Tensor, chain: ChainKeys, rows: Tensor) -> None:
    """Add `rows` [L, ...] where `_gather` took them from. Slices are added several times faster than indexed rows."""
    done = 0
    for start, end in chain.runs:
        total[start:end] += rows[done : done + end - start]
        done += end - start


def _rows(x: Tensor, block: _Block) -> Tensor:
    """The rows of a block in [G, R, T, D], as [G, R * n, D]: heads that share keys stand below each other."""
    return x[:, :, block.start : block.end].flatten(1, 2)


def _set_rows(x: Tensor, block: _Block, rows: Tensor) -> None:
    """The inverse of `_rows`."""
    x[:, :, block.start : block.end] = rows.unflatten(1, (x.shape[1], -1))
