"""Softmax attention over a prefix tree on the CPU, chain by chain (unbranched runs of tokens): its plan, and one
autograd function that computes it.

A chain of the layout is what one path adds to the paths before it: `n` tokens in a row, without branches, whose keys
are the path from the root. Attention of a chain is that of the last `n` tokens of an ordinary causal sequence. So only
the causal attention of the new tokens is computed, no mask is wider than a block, and the loop is over paths, of which
there are far fewer than nodes of the tree.

The queries of a long chain are split into blocks: a block computes no keys after its own, and its scores stay in the
cache. Short chains of similar size are padded and bundled: agents add a few tokens per turn, and one call for each such
chain would take longer than its arithmetic.

Rows are kept as [G, T + 1, R, D]: key head, place in the layout, query head of that key head. So one matrix product per
block serves all query heads that share a key. The last place is not part of the layout. It is zero, for padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art.trainer.tree import Chain

BLOCK = 96
"""Queries per block. 64 to 128 measured alike; smaller blocks need more calls, larger ones compute masked scores."""

_BUNDLE_SCORES = 2**18
"""Most attention scores in a bundle, over all heads, so that they stay in the cache."""

_MAX_PADDED = 1.25
"""Most scores in a bundle with padding, as a multiple of the scores without."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of a chain (or of a bundle of B chains), which attend to the keys [first, last) of its path."""

    queries: slice | Tensor  # n consecutive places of the layout, or [B * n] places
    first: int
    last: int
    hidden: Tensor  # [B, n, 1, W] 0 or -inf for the last W keys; all queries see the keys before those


@dataclass(frozen=True, slots=True)
class ChainWork:
    """Chains that are computed at once: a long one, block by block, or a bundle of B short ones in one block."""

    chains: tuple[Chain, ...]
    blocks: tuple[Block, ...]
    keys: Tensor | None = None  # [B * L] places of a bundle's keys in the layout; padding is place T, after the layout

    def gather(self, rows: Tensor) -> Tensor:
        """Take the rows on the chains' paths from `rows` [G, T + 1, D]; returns [G * B, L, D]."""
        if self.keys is None:
            parts = [rows[:, start:end] for start, end in self.chains[0].runs]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        picked = rows.index_select(1, self.keys)
        return picked.view(len(rows) * len(self.chains), -1, rows.shape[-1])

    def scatter_add(self, total: Tensor, rows: Tensor) -> None:
        """Add `rows` [G * B, L, D] to `total` [G, T + 1, D] where `gather` takes them from."""
        by_chain = rows.unflatten(0, (len(total), len(self.chains)))
        for number, chain in enumerate(self.chains):
            done = 0
            for start, end in chain.runs:  # adding slices is several times faster than adding indexed rows
                total[:, start:end] += by_chain[:, number, done : done + end - start]
                done += end - start


Work = Sequence[ChainWork]


def plan_chains(chains: Sequence[Chain], *, num_tokens: int, num_heads: int, window: int | None) -> Work:
    """Plan the attention of all chains (unbranched runs) of a prefix tree of `num_tokens` tokens.

    `window` is the size of the sliding window, if any.
    """
    short = [chain for chain in chains if chain.num_queries <= BLOCK]
    short.sort(key=lambda chain: (chain.num_queries, chain.num_keys), reverse=True)
    work = [_long(chain, window) for chain in chains if chain.num_queries > BLOCK]
    for group in _bundle(short, _BUNDLE_SCORES // num_heads):
        work.append(_long(group[0], window) if len(group) == 1 else _pad(group, num_tokens, window))
    return work


def _bundle(chains: Sequence[Chain], max_scores: int) -> Iterator[list[Chain]]:
    """Group neighbours of `chains` (sorted by queries, most first) that are of similar size."""
    group: list[Chain] = []
    longest = scores = 0
    for chain in chains:
        # Padded, every member has the queries of the first one and the keys of the longest. A bundle ends where that
        # leaves the cache, or computes a quarter more than the chains alone would.
        wider = max(longest, chain.num_keys)
        padded = (len(group) + 1) * (group[0] if group else chain).num_queries * wider
        more = scores + chain.num_queries * chain.num_keys
        if group and padded > min(max_scores, _MAX_PADDED * more):
            yield group
            group, wider, more = [], chain.num_keys, chain.num_queries * chain.num_keys
        group.append(chain)
        longest, scores = wider, more
    if group:
        yield group


def _long(chain: Chain, window: int | None) -> ChainWork:
    prefix = chain.num_keys - chain.num_queries
    blocks = []
    for start in range(chain.start, chain.end, BLOCK):
        end = min(start + BLOCK, chain.end)
        first = 0 if window is None else max(0, prefix + start - chain.start - window + 1)
        last = prefix + end - chain.start
        # Without a window only the block's own keys are hidden from some of its queries.
        # With one, keys before `first` are behind the window of the block's first query, and so of all of them.
        hidden = _future(end - start) if window is None else _hidden(end - start, last - first, window)
        blocks.append(Block(slice(start, end), first, last, hidden[None, :, None]))
    return ChainWork((chain,), tuple(blocks))


def _pad(chains: Sequence[Chain], num_tokens: int, window: int | None) -> ChainWork:
    num_queries, num_keys = max(c.num_queries for c in chains), max(c.num_keys for c in chains)
    queries = np.full((len(chains), num_queries), num_tokens)
    keys = np.full((len(chains), num_keys), num_tokens)
    hidden = torch.full((len(chains), num_queries, 1, num_keys), -torch.inf)
    hidden[..., 0] = 0.0  # padded queries see one key, so that their softmax is finite; their results are not read
    for row, chain in enumerate(chains):
        queries[row, : chain.num_queries] = np.arange(chain.start, chain.end)
        keys[row, : chain.num_keys] = chain.path
        hidden[row, : chain.num_queries, 0, : chain.num_keys] = _hidden(chain.num_queries, chain.num_keys, window)
    block = Block(torch.from_numpy(queries.ravel()), 0, num_keys, hidden)
    return ChainWork(tuple(chains), (block,), torch.from_numpy(keys.ravel()))


@lru_cache(maxsize=BLOCK)
def _future(count: int) -> Tensor:
    """The causal mask of a block of `count` queries. Shared by all callers: do not modify."""
    return _hidden(count, count, None)


def _hidden(num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """[num_queries, num_keys]: 0, or -inf where a query does not see a key. Queries are the last places of the keys."""
    places = torch.arange(num_keys - num_queries, num_keys)[:, None]
    keys = torch.arange(num_keys)[None, :]
    unseen = keys > places
    if window is not None:
        unseen |= keys <= places - window
    return torch.zeros(num_queries, num_keys).masked_fill_(unseen, -torch.inf)


_KEEP_BYTES = 2**26
"""Attention probabilities of a layer are kept for the backward pass up to this size. Above it they are recomputed."""


def attend_chains(
    query: Tensor, key: Tensor, value: Tensor, work: Work, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention over a prefix tree in float32: each query sees the keys on its path from the root.

    query [1, H, T, D], key [1, G, T, D], value [1, G, T, E]; returns [1, T, H, E]. `sinks` [H] are logits that take
    part in the softmax and have no value.
    """
    return _ChainAttention.apply(query[0], key[0], value[0], sinks, work, scale)[None]


class _ChainAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """query [H, T, D], key [G, T, D], value [G, T, E] and optional sinks [H] give [T, H, E].

    The backward pass is that of softmax attention, block by block. A sink is a key whose value is 0, so its gradient dp
    is 0 too, and the formulas for the other keys do not change.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, work: Work, scale: float
    ) -> Tensor:
        queries = _by_group(query.transpose(0, 1), len(key)).mul_(scale)
        key_rows, value_rows = (_by_group(x.transpose(0, 1), len(x)).squeeze(2) for x in (key, value))
        sink_rows = None if sinks is None else sinks.detach().float().view(len(key), -1)  # [G, R]
        out = queries.new_zeros(*queries.shape[:-1], value.shape[-1])
        kept: list[Tensor] = []
        kept_bytes = 0
        for item in work:
            keys, values = item.gather(key_rows), item.gather(value_rows)
            for block in item.blocks:
                seen = slice(block.first, block.last)
                p = _probabilities(_read(queries, block), keys[:, seen], block, sink_rows)
                _write(out, block, torch.bmm(p, values[:, seen]))
                # Long contexts do not fit: then nothing is kept, and the backward pass computes all of them again.
                kept_bytes += p.numel() * p.element_size()
                if kept_bytes <= _KEEP_BYTES:
                    kept.append(p)
        kept = kept if kept_bytes <= _KEEP_BYTES else []
        ctx.save_for_backward(queries, key_rows, value_rows, out, sink_rows, *kept)
        ctx.work, ctx.scale, ctx.dtypes = work, scale, (query.dtype, key.dtype, value.dtype)
        return _by_token(out).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, key_rows, value_rows, out, sink_rows, *kept = ctx.saved_tensors
        grad_out = _by_group(grads[0], len(key_rows))
        # The softmax's backward pass subtracts sum(p * dp) over a query's keys from dp. That sum is out . grad_out.
        dots = (out * grad_out).sum(-1, keepdim=True)
        grad_queries, grad_keys, grad_values = (torch.zeros_like(x) for x in (queries, key_rows, value_rows))
        grad_sinks = torch.zeros_like(sink_rows) if ctx.needs_input_grad[3] else None
        probabilities = iter(kept)
        for item in ctx.work:
            keys, values = item.gather(key_rows), item.gather(value_rows)
            dkeys, dvalues = keys.new_zeros(keys.shape), values.new_zeros(values.shape)
            for block in item.blocks:
                seen = slice(block.first, block.last)
                rows, douts = _read(queries, block), _read(grad_out, block)
                p = next(probabilities) if kept else _probabilities(rows, keys[:, seen], block, sink_rows)
                # out = p V and p = softmax(Q K^T) give dV = p^T dout, dp = dout V^T, dscores = p (dp - dots),
                # dQ = dscores K and dK = dscores^T Q. Blocks of one chain add to the same keys and values.
                dvalues[:, seen] += torch.bmm(p.transpose(1, 2), douts)
                dscores = torch.bmm(douts, values[:, seen].transpose(1, 2))
                block_dots = _read(dots, block)
                if grad_sinks is not None:
                    rest = (1 - p.sum(-1, keepdim=True)).mul_(block_dots)  # probability of the sink, times dot
                    grad_sinks -= rest.view(len(grad_sinks), -1, grad_sinks.shape[1]).sum(1)
                dscores.sub_(block_dots).mul_(p)
                dkeys[:, seen] += torch.bmm(dscores.transpose(1, 2), rows)
                _write(grad_queries, block, torch.bmm(dscores, keys[:, seen]))
            item.scatter_add(grad_keys, dkeys)
            item.scatter_add(grad_values, dvalues)
        by_token = (
            _by_token(grad_queries).mul_(ctx.scale),
            *(_by_token(x[:, :, None]) for x in (grad_keys, grad_values)),
        )
        by_head = (x.transpose(0, 1).to(dtype) for x, dtype in zip(by_token, ctx.dtypes, strict=True))
        return *by_head, None if grad_sinks is None else grad_sinks.flatten(), None, None


def _probabilities(rows: Tensor, keys: Tensor, block: Block, sinks: Tensor | None) -> Tensor:
    """Attention probabilities: queries [G * B, n * R, D] and keys [G * B, L, D] of a block give [G * B, n * R, L].

    With `sinks` [G, R] each row sums to less than 1.
    """
    scores = torch.bmm(rows, keys.transpose(1, 2))
    num_chains, num_queries, _, width = block.hidden.shape
    by_query = scores.view(-1, num_chains, num_queries, scores.shape[1] // num_queries, scores.shape[2])
    by_query[..., -width:] += block.hidden
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    # The sink is one more term of the softmax's denominator, without a probability of its own here.
    total = torch.logaddexp(by_query.logsumexp(-1).unflatten(0, (len(sinks), -1)), sinks[:, None, None, None])
    return scores.sub_(total.view(*scores.shape[:2], 1)).exp_()


def _by_group(rows: Tensor, groups: int) -> Tensor:
    """[T, H, D] -> [G, T + 1, R, D] in float32."""
    num_tokens, num_heads, size = rows.shape
    out = rows.new_zeros(groups, num_tokens + 1, num_heads // groups, size, dtype=torch.float32)
    out[:, :-1] = rows.unflatten(1, (groups, -1)).transpose(0, 1)
    return out


def _by_token(rows: Tensor) -> Tensor:
    """[G, T + 1, R, D] -> [T, H, D]: the inverse of `_by_group`."""
    return rows[:, :-1].transpose(0, 1).flatten(1, 2)


def _read(rows: Tensor, block: Block) -> Tensor:
    """Read a block's rows from [G, T + 1, R, D]; returns [G * B, n * R, D]."""
    if isinstance(block.queries, slice):
        return rows[:, block.queries].flatten(1, 2)
    num_chains, num_queries = block.hidden.shape[:2]
    picked = rows.index_select(1, block.queries)
    return picked.view(len(rows) * num_chains, num_queries * rows.shape[2], rows.shape[3])


def _write(rows: Tensor, block: Block, values: Tensor) -> None:
    """Write `values` to the rows that `_read` reads."""
    if isinstance(block.queries, slice):
        rows[:, block.queries] = values.unflatten(1, (-1, rows.shape[2]))
    else:
        rows.index_copy_(1, block.queries, values.reshape(len(rows), -1, *rows.shape[2:]))
