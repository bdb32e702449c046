"""Who trains what when several processes share an update: micro-batches are dealt by the tokens of their trees."""

from __future__ import annotations

import math
from collections.abc import Sequence

from art.trainer.tree.pack import pack
from art.trainer.tree.tree import SamplePath, sort_paths

_PRECISION = 0.02
"""The budget is searched for until it is known to this share of itself."""


def pack_shares(paths: Sequence[SamplePath], *, max_tokens: int, num_shares: int) -> list[list[list[int]]]:
    """Per share its micro-batches, each as indices into `paths`.

    Of several budgets up to `max_tokens` the one that leaves the least to the process with most to do: a smaller budget
    deals more evenly, but cuts more trees, and each part of a tree repeats its prefix. The same in every process, as it
    depends on tokens and ids only.
    """
    packings = [pack(paths, max_tokens=max_tokens)]
    if num_shares == 1:
        return packings
    # As many rounds as `max_tokens` needs; then the smallest budget that needs no more of them.
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
    return min((_deal_out(paths, packed, num_shares) for packed in packings), key=lambda dealt: dealt[0])[1]


def _deal_out(
    paths: Sequence[SamplePath], packed: Sequence[list[int]], num_shares: int
) -> tuple[tuple[int, int], list[list[list[int]]]]:
    """The largest share's tokens and the number of micro-batches, both better when fewer; and the shares."""
    sizes = _sizes(paths, packed)
    shares = deal(sizes, num_shares)
    largest = max(sum(sizes[number] for number in share) for share in shares)
    return (largest, len(packed)), [[packed[number] for number in share] for share in shares]


def deal(sizes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Indices into `sizes` per share, in ascending order: the largest first, each to whoever has least so far.

    So shares differ by no more than the largest of `sizes`, and none is above 4/3 of the best that could be done
    (Graham, "Bounds on multiprocessing timing anomalies").
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
    """Tokens of the tree of `paths`, without building it."""
    _, shared = sort_paths(paths)
    return sum(len(path.token_ids) for path in paths) - sum(shared)
