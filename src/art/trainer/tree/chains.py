"""The work of tree attention on CPU, chain by chain.

A chain of the layout is what one path adds to the paths before it: `n` tokens in a row, without branches, whose keys
are the path from the root. Attention of a chain is that of the last `n` tokens of an ordinary causal sequence. So the
work is the causal attention of the new tokens only, no mask wider than a block exists, and the loop is over paths and
not over the (many more) nodes of the tree.

The queries of a long chain go in blocks, so that a block sees no keys behind itself and its scores stay in the cache.
Short chains of similar size are padded and go in bundles: agents add a few tokens per turn, and their products alone
are smaller than the calls that start them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from art.trainer.tree.tree import Chain

BLOCK = 96
"""Queries per block. Measured: 64 to 128 are alike; smaller ones cost calls, larger ones compute masked scores."""

_BUNDLE_SCORES = 2**18
"""Scores of a bundle over all heads: they stay in the cache."""

_MAX_PADDED = 1.25
"""A bundle computes at most so many times the scores of its chains."""


@dataclass(frozen=True, slots=True)
class ChainKeys:
    """A chain of a layout, and where its keys lie: runs of the layout, from the root to the chain's own tokens."""

    start: int
    end: int
    runs: tuple[tuple[int, int], ...]  # [start, end) each; the last ones hold the chain's own `end - start` tokens

    @property
    def num_queries(self) -> int:
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        return sum(end - start for start, end in self.runs)


def make_chain_keys(chain: Chain) -> ChainKeys:
    """The runs of `chain.path`: few, as the path only jumps where it left a sibling out."""
    borders = np.flatnonzero(np.diff(chain.path) != 1) + 1
    runs = tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(chain.path, borders))
    return ChainKeys(start=chain.start, end=chain.end, runs=runs)


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of a chain, or of a bundle of B chains, against the keys [first, last) of its path."""

    queries: slice | Tensor  # n places of the layout in a row, or [B * n] of them
    first: int
    last: int
    hidden: Tensor  # [B, n, 1, W] 0 or minus infinity, for the last W keys: all queries see those before


@dataclass(frozen=True, slots=True)
class LongChain:
    """A chain that is attended by itself, block by block."""

    chain: ChainKeys
    blocks: tuple[Block, ...]

    def gather(self, rows: Tensor) -> Tensor:
        """The rows [G, L, D] of `rows` [G, T + 1, D] on the chain's path."""
        parts = [rows[:, start:end] for start, end in self.chain.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def scatter_add(self, total: Tensor, rows: Tensor) -> None:
        """Add `rows` [G, L, D] to `total` [G, T + 1, D] where `gather` takes them from."""
        _add_runs(total, self.chain, rows)


@dataclass(frozen=True, slots=True)
class Bundle:
    """B chains of up to n queries and L keys each, attended at once. Padding stands at place T, behind the layout."""

    chains: tuple[ChainKeys, ...]
    keys: Tensor  # [B * L] places of the layout
    blocks: tuple[Block]

    def gather(self, rows: Tensor) -> Tensor:
        """The rows [G * B, L, D] of `rows` [G, T + 1, D] on the paths of the chains."""
        picked = rows.index_select(1, self.keys)
        return picked.view(len(rows) * len(self.chains), -1, rows.shape[-1])

    def scatter_add(self, total: Tensor, rows: Tensor) -> None:
        """Add `rows` [G * B, L, D] to `total` [G, T + 1, D] where `gather` takes them from."""
        by_chain = rows.unflatten(0, (len(total), len(self.chains)))
        for number, chain in enumerate(self.chains):
            _add_runs(total, chain, by_chain[:, number])


Work = Sequence[LongChain | Bundle]


def _add_runs(total: Tensor, chain: ChainKeys, rows: Tensor) -> None:
    done = 0
    for start, end in chain.runs:  # slices are added several times faster than indexed rows
        total[:, start:end] += rows[:, done : done + end - start]
        done += end - start


def plan_chains(chains: Sequence[ChainKeys], *, num_tokens: int, num_heads: int, window: int | None) -> Work:
    """All chains of a layout of `num_tokens` tokens, with what each may see under a sliding window."""
    short = [chain for chain in chains if chain.num_queries <= BLOCK]
    short.sort(key=lambda chain: (chain.num_queries, chain.num_keys), reverse=True)
    work: list[LongChain | Bundle] = [_long(chain, window) for chain in chains if chain.num_queries > BLOCK]
    for group in _bundle(short, _BUNDLE_SCORES // num_heads):
        work.append(_long(group[0], window) if len(group) == 1 else _pad(group, num_tokens, window))
    return work


def _bundle(chains: Sequence[ChainKeys], max_scores: int) -> Iterator[list[ChainKeys]]:
    """Neighbours in the order of `chains` (most queries first) that are similar enough."""
    group: list[ChainKeys] = []
    longest = scores = 0
    for chain in chains:
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


def _long(chain: ChainKeys, window: int | None) -> LongChain:
    prefix = chain.num_keys - chain.num_queries
    blocks = []
    for start in range(chain.start, chain.end, BLOCK):
        end = min(start + BLOCK, chain.end)
        first = 0 if window is None else max(0, prefix + start - chain.start - window + 1)
        last = prefix + end - chain.start
        # Without a window only the block's own keys are hidden from some of its queries.
        hidden = _future(end - start) if window is None else _hidden(end - start, last - first, window)
        blocks.append(Block(slice(start, end), first, last, hidden[None, :, None]))
    return LongChain(chain, tuple(blocks))


def _pad(chains: Sequence[ChainKeys], num_tokens: int, window: int | None) -> Bundle:
    num_queries, num_keys = max(c.num_queries for c in chains), max(c.num_keys for c in chains)
    queries = np.full((len(chains), num_queries), num_tokens)
    keys = np.full((len(chains), num_keys), num_tokens)
    hidden = torch.full((len(chains), num_queries, 1, num_keys), -torch.inf)
    hidden[..., 0] = 0.0  # padded queries see one key, which keeps their softmax finite; nobody reads them
    for row, chain in enumerate(chains):
        queries[row, : chain.num_queries] = np.arange(chain.start, chain.end)
        keys[row, : chain.num_keys] = np.concatenate([np.arange(start, end) for start, end in chain.runs])
        hidden[row, : chain.num_queries, 0, : chain.num_keys] = _hidden(chain.num_queries, chain.num_keys, window)
    block = Block(torch.from_numpy(queries.ravel()), 0, num_keys, hidden)
    return Bundle(tuple(chains), torch.from_numpy(keys.ravel()), (block,))


@lru_cache(maxsize=BLOCK)
def _future(count: int) -> Tensor:
    """Do not change it: it is shared."""
    return _hidden(count, count, None)


def _hidden(num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """[num_queries, num_keys]: 0, or minus infinity where the query, one of the last places, does not see the key."""
    places = torch.arange(num_keys - num_queries, num_keys)[:, None]
    keys = torch.arange(num_keys)[None, :]
    unseen = keys > places
    if window is not None:
        unseen |= keys <= places - window
    return torch.zeros(num_queries, num_keys).masked_fill_(unseen, -torch.inf)
