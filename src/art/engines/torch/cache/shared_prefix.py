"""Attention of decoding sequences that begin with the same tokens, such as the rollouts of a group.

The keys of their common prefix are read once for all of them, and those after it row by row. A softmax over both parts
is the average of the softmaxes over each, weighted by the sums of their exponentials. This is exact up to rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from art.engines.torch.cache.kv_cache import Pool
from art.engines.torch.cache.sharing import Ints, SharedKeys, Sharing

MIN_PREFIX = 32
"""Shorter common prefixes are read once per sequence."""
STEP_COST = 1_000_000
"""What sharing costs per layer and step, in bytes of keys and values that could be read in that time (about 100
microseconds on an EPYC core)."""
COPIES = 3
"""The keys of a shared prefix are read, written and read again: prefixes of many rows are brought side by side."""
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens that several sequences of a decode group begin with."""

    members: Ints  # indices into the group, ascending
    length: int


def find_sharing(pool: Pool, rows: Ints, positions: Ints, like: Tensor) -> Sharing | None:
    """Which of the sequences in `rows` [n] of `pool`, whose next tokens are at `positions` [n], are to share prefixes.

    `None` if that saves nothing. The result is kept until other rows decode or one of them changes its sequence.
    """
    if not pool.can_share:
        return None
    key = pool.num_changes, rows.tobytes()
    if pool.sharing is None or pool.sharing[0] != key:
        chosen = _choose(_find(pool, rows, positions), pool.token_bytes)
        pool.sharing = key, _plan(chosen, rows, like) if chosen else None
    return pool.sharing[1]


def _find(pool: Pool, rows: Ints, positions: Ints) -> list[Prefix]:
    width = int(positions.max())
    at_most = (len(rows) - COPIES) * width * pool.token_bytes
    if len(rows) < 2 or width < MIN_PREFIX or at_most <= STEP_COST:
        return []
    tokens, uids = pool.tokens[rows, :width], pool.uids[rows]
    keys = [(int(uid), row.tobytes()) for uid, row in zip(uids, tokens, strict=True)]
    order = np.array(sorted(range(len(rows)), key=keys.__getitem__))  # longest common prefixes side by side
    tokens, uids, known = tokens[order], uids[order], positions[order]
    differs = tokens[1:] != tokens[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    common = np.minimum(np.where(uids[1:] == uids[:-1], common, 0), np.minimum(known[1:], known[:-1]))
    prefixes: list[Prefix] = []
    starts = [0, *(np.flatnonzero(common < MIN_PREFIX) + 1).tolist(), len(rows)]
    for first, last in itertools.pairwise(starts):
        prefixes += _best(order, common, first, last)[1]
    return prefixes


def _best(order: Ints, common: Ints, first: int, last: int, depth: int = 0) -> tuple[int, list[Prefix]]:
    """The most keys that sharing prefixes among sequences `order[first:last]` saves, and these prefixes.

    Either all share what all have in common, or the best is done on both sides of where they have least in common. No
    more than `_MAX_DEPTH` times: hundreds of sequences that each extend the one before would take too long.
    """
    if last - first < 2:
        return 0, []
    inner = common[first : last - 1]
    least = int(inner.argmin())
    length = int(inner[least])
    whole = (last - first - COPIES) * length
    if inner.max() == length or depth == _MAX_DEPTH:
        return (whole, [Prefix(np.sort(order[first:last]), length)]) if whole > 0 else (0, [])
    split = first + least + 1
    sides = [_best(order, common, *side, depth + 1) for side in ((first, split), (split, last))]
    apart = sides[0][0] + sides[1][0]
    if whole > apart:
        return whole, [Prefix(np.sort(order[first:last]), length)]
    return apart, sides[0][1] + sides[1][1]


def _choose(prefixes: Sequence[Prefix], token_bytes: int) -> list[Prefix]:
    """The prefixes to share; none, if that saves nothing.

    The rows that share are read from the end of the shortest prefix on, so a short one can make sharing worse for all.
    """
    best: list[Prefix] = []
    most = STEP_COST
    for shortest in {prefix.length for prefix in prefixes}:
        kept = [prefix for prefix in prefixes if prefix.length >= shortest]
        members = np.concatenate([prefix.members for prefix in kept])
        saved = len(members) * shortest - COPIES * sum(prefix.length for prefix in kept)
        saved *= token_bytes
        if saved > most:
            best, most = kept, saved
    return best


def _plan(prefixes: Sequence[Prefix], rows: Ints, like: Tensor) -> Sharing:
    members = np.sort(np.concatenate([prefix.members for prefix in prefixes]))
    lengths, places = np.empty_like(members), np.empty_like(members)
    room = max(len(prefix.members) for prefix in prefixes)
    queries = np.zeros((len(prefixes), room), np.int64)
    for i, prefix in enumerate(prefixes):
        own = np.searchsorted(members, prefix.members)
        queries[i, : len(own)] = own
        places[own] = np.arange(i * room, i * room + len(own))
        lengths[own] = prefix.length
    of_prefix = np.array([prefix.length for prefix in prefixes])
    num_keys, mask = int(of_prefix.max()), None
    if int(of_prefix.min()) < num_keys:
        hidden = torch.from_numpy(np.arange(num_keys) >= of_prefix[:, None])
        mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -math.inf)[:, None, None, :]
    first_rows = torch.tensor([int(rows[prefix.members[0]]) for prefix in prefixes])
    keys = SharedKeys(first_rows, num_keys, mask, torch.from_numpy(queries.ravel()), torch.from_numpy(places))
    return Sharing(members, lengths, keys)


def attend_to_prefixes(
    shared: SharedKeys, q: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each query over its prefix: q [n, heads, d], keys and values [rows, kv heads, capacity, d] ->
    [n, heads, d] and the log of the sum of exponentials [n, heads]."""
    num_prefixes, num_heads, size = len(shared.rows), q.shape[1], q.shape[2]
    by_prefix = num_prefixes, -1, keys.shape[1], num_heads // keys.shape[1]  # prefixes, places, kv heads, queries
    keys, values = (x[:, :, : shared.num_keys].index_select(0, shared.rows) for x in (keys, values))
    q = q.index_select(0, shared.queries).view(*by_prefix, size).transpose(1, 2).flatten(2, 3)
    out, log_sum = attend_with_sum(q, keys, values, shared.mask, scale)
    by_head = num_prefixes, keys.shape[1], -1, by_prefix[3]
    out = out.reshape(*by_head, size).transpose(1, 2).reshape(-1, num_heads, size)
    log_sum = log_sum.reshape(by_head).transpose(1, 2).reshape(-1, num_heads)
    return out.index_select(0, shared.places), log_sum.index_select(0, shared.places)


def attend_with_sum(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention [B, heads, n, e] and the log of the sum of exponentials [B, heads, n]."""
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, attn_mask=mask, scale=scale
    )
    return out, log_sum


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """The attention over the keys of both: each is [n, heads, e] and the log of its sum of exponentials [n, heads]."""
    weight = (second[1] - first[1]).sigmoid_()
    return torch.lerp(first[0], second[0], weight[..., None].to(first[0].dtype))
