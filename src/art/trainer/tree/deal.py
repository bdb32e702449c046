"""Divide the micro-batches of an update among several processes, by the number of tree tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from art.trainer.tree.pack import pack
from art.trainer.tree.tree import SamplePath, sort_paths

_PRECISION = 0.02
"""Relative precision of the search for the best token budget."""


def pack_shares(paths: Sequence[SamplePath], *, max_tokens: int, num_shares: int) -> list[list[list[int]]]:
    """Split `paths` into micro-batches for `num_shares` processes. Return indices into `paths`, by process.

    Tries several token budgets up to `max_tokens` and takes the one with the smallest largest share. A smaller budget
    spreads the work more evenly, but cuts more trees, and each part of a tree repeats its prefix. The result is the
    same in every process, because it depends only on tokens and ids.
    """
    packings = [pack(paths, max_tokens=max_tokens)]
    if num_shares == 1:
        return packings
    # Search for the smallest budget that needs no more rounds of micro-batches than `max_tokens` does.
    most = num_shares * math.ceil(len(packings[0]) / num_shares)
    sizes = _sizes(paths, packings[0])
    low, high = math.ceil(sum(sizes) / most), min(max_tokens, max(sizes))
    while high - low > 1 + low * _PRECISION:
        budget = (low + high) // 2
        packings.append(pack(paths, max_tokens=budget))
        if len(packings[-1]) <= most:
            high = budget
        else:
            low = budget
    dealt = []
    for packed in packings:
        sizes = _sizes(paths, packed)
        shares = deal(sizes, num_shares)
        largest = max(sum(sizes[number] for number in share) for share in shares)
        dealt.append((largest, len(packed), [[packed[number] for number in share] for share in shares]))
    return min(dealt, key=lambda one: one[:2])[2]


def deal(sizes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Deal items of `sizes` to shares: the largest item first, each to the share with the smallest sum so far.

    Returns ascending indices into `sizes` for each share. Sums differ by at most the largest item, and the largest sum
    is at most 4/3 of the optimum (Graham, "Bounds on multiprocessing timing anomalies").
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += sizes[index]
    return [sorted(share) for share in shares]


def _sizes(paths: Sequence[SamplePath], packed: Sequence[list[int]]) -> list[int]:
    return [count_tree_tokens([paths[index] for index in indices]) for indices in packed]


def count_tree_tokens(paths: Sequence[SamplePath]) -> int:
    """Count the tokens in the prefix tree of `paths` without building the tree."""
    _, shared = sort_paths(paths)
    return sum(path.num_tokens for path in paths) - sum(shared)
