"""Who trains what when several processes share an update: micro-batches are dealt by the tokens of their trees."""

from __future__ import annotations

import math
from collections.abc import Sequence

from art.trainer.pack import pack
from art.trainer.tree import SamplePath, sort_paths

_SLACK = 1.1
"""Budget over an even share: cut trees repeat prefixes, and pieces seldom fill a micro-batch to the last token."""


def pack_shares(paths: Sequence[SamplePath], *, max_tokens: int, num_shares: int) -> list[list[list[int]]]:
    """Per share its micro-batches, each as indices into `paths`.

    The budget goes down where fewer or larger micro-batches would leave some of the processes idle. The same in every
    process, as it depends on tokens and ids only.
    """
    if num_shares > 1:
        total = count_tree_tokens(paths)
        rounds = math.ceil(total / (num_shares * max_tokens))
        max_tokens = min(max_tokens, math.ceil(_SLACK * total / (num_shares * rounds)))
    packed = pack(paths, max_tokens=max_tokens)
    sizes = [count_tree_tokens([paths[index] for index in indices]) for indices in packed]
    return [[packed[number] for number in share] for share in deal(sizes, num_shares)]


def deal(sizes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Indices into `sizes` per share, in ascending order: the largest first, each to whoever has least so far."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += sizes[index]
    return [sorted(share) for share in shares]


def count_tree_tokens(paths: Sequence[SamplePath]) -> int:
    """Tokens of the tree of `paths`, without building it."""
    _, shared = sort_paths(paths)
    return sum(len(path.token_ids) for path in paths) - sum(shared)
