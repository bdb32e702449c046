"""Split a batch into micro-batches: sets of samples whose prefix tree fits the token budget.

A large tree is cut between two paths of its depth-first order, and each part repeats the path from the root. So a
micro-batch is simply a set of samples that `build_tree` lays out. Small trees are packed together by best fit.

Divide the micro-batches of an update among several processes, by the number of tree tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence

from art.trainer.tree.tree import SamplePath, sort_paths

_CUT_WINDOW = 0.25
"""Share of a full part that may be given up to cut where neighbouring paths share least, e.g. between two groups."""


def pack(paths: Sequence[SamplePath], *, max_tokens: int, branches: bool = True) -> list[list[int]]:
    """Split `paths` into micro-batches of at most `max_tokens` tree tokens; returns indices into `paths` for each.

    A path that is longer than `max_tokens` gets a micro-batch of its own. The result depends only on the tokens and ids
    of the samples, not on their order. `branches` is that of `build_tree`, which lays out the micro-batches.
    """
    order, shared = sort_paths(paths, branches=branches)
    lengths = [paths[index].num_tokens for index in order]
    pieces: list[tuple[int, list[int]]] = []  # tree tokens, ranks in `order`
    starts = [rank for rank, depth in enumerate(shared) if depth == 0]  # a path that shares nothing starts a tree
    for first, last in zip(starts, [*starts[1:], len(shared)], strict=True):
        pieces.extend(_cut(first, last, lengths, shared, max_tokens))
    pieces.sort(key=lambda piece: -piece[0])
    bins: list[tuple[int, list[int]]] = []
    for size, ranks in pieces:
        fitting = [i for i, (used, _) in enumerate(bins) if used + size <= max_tokens]
        if fitting:
            best = max(fitting, key=lambda i: bins[i][0])
            bins[best] = (bins[best][0] + size, bins[best][1] + ranks)
        else:
            bins.append((size, ranks))
    return [[order[rank] for rank in ranks] for _, ranks in bins]


def _cut(
    first: int, last: int, lengths: Sequence[int], shared: Sequence[int], max_tokens: int
) -> list[tuple[int, list[int]]]:
    """Cut the tree of ranks `[first, last)` into parts within the budget: (tree tokens, ranks) each."""
    parts = []
    while first < last:
        sizes = [lengths[first]]
        while first + len(sizes) < last:
            rank = first + len(sizes)
            size = sizes[-1] + lengths[rank] - shared[rank]
            if size > max_tokens:
                break
            sizes.append(size)
        end = first + len(sizes)
        if end < last:
            candidates = [e for e in range(first + 1, end + 1) if sizes[e - first - 1] >= (1 - _CUT_WINDOW) * sizes[-1]]
            end = min(candidates, key=lambda e: (shared[e], -e))
        parts.append((sizes[end - first - 1], list(range(first, end))))
        first = end
    return parts


def split_minibatches(paths: Sequence[SamplePath], num_minibatches: int, *, seed: int) -> list[list[SamplePath]]:
    """Split `paths` into mini-batches of whole groups. Fewer groups than mini-batches give fewer mini-batches.

    Groups are taken in an order that only `seed` and their number decide, and each goes to the mini-batch with the
    fewest targets (trained tokens) so far. So any two mini-batches differ by at most the targets of the largest group.
    Samples of component "sft" are split on their own, by rollout, so that each mini-batch has its part of both.
    """
    supervised = [path for path in paths if path.sample.component == "sft"]
    sampled = [path for path in paths if path.sample.component != "sft"]
    if not supervised or not sampled:
        groups = group_samples(paths)
        return _split_groups(groups, min(num_minibatches, len(groups)), seed)
    groups = group_samples(sampled)
    parts = _split_groups(groups, min(num_minibatches, len(groups)), seed)
    shares = _split_groups(group_samples(supervised), len(parts), seed)
    return [[*part, *share] for part, share in zip(parts, shares, strict=True)]


def _split_groups(groups: list[list[SamplePath]], num_parts: int, seed: int) -> list[list[SamplePath]]:
    """Split `groups` into `num_parts` parts of about as many targets. If there are fewer groups, parts are empty."""
    order = list(range(len(groups)))
    if num_parts > 1:
        random.Random(seed).shuffle(order)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * len(parts)
    for index in order:
        least = loads.index(min(loads))
        parts[least].append(index)
        loads[least] += sum(len(path.query_positions) for path in groups[index])
    return [[path for index in sorted(part) for path in groups[index]] for part in parts]


def split_batches(paths: Sequence[SamplePath], batch_size: int) -> list[list[SamplePath]]:
    """Split `paths` into batches of `batch_size` rollouts, in order. The last batch may be smaller."""
    rollouts = group_by_rollout(paths)
    starts = range(0, len(rollouts), batch_size)
    return [[path for rollout in rollouts[start : start + batch_size] for path in rollout] for start in starts]


def group_by_rollout(paths: Sequence[SamplePath]) -> list[list[SamplePath]]:
    """Collect the samples of each rollout, in the order in which rollouts first appear."""
    return _collect(paths, [path.sample.rollout_id for path in paths])


def group_samples(paths: Sequence[SamplePath]) -> list[list[SamplePath]]:
    """Collect the samples of each group, in the order in which groups first appear.

    A rollout without a `group_id` is a group of its own.
    """
    samples = [path.sample for path in paths]
    return _collect(paths, [(sample.group_id, sample.group_id or sample.rollout_id) for sample in samples])


def _collect(paths: Sequence[SamplePath], keys: Sequence[Hashable]) -> list[list[SamplePath]]:
    collected: dict[Hashable, list[SamplePath]] = {}
    for path, key in zip(paths, keys, strict=True):
        collected.setdefault(key, []).append(path)
    return list(collected.values())


_PRECISION = 0.02
"""Relative precision of the search for the best token budget."""


def pack_shares(
    paths: Sequence[SamplePath], *, max_tokens: int, num_shares: int, branches: bool = True
) -> list[list[list[int]]]:
    """Split `paths` into micro-batches for `num_shares` processes. Return indices into `paths`, by process.

    Tries several token budgets up to `max_tokens` and takes the one with the smallest largest share. A smaller budget
    spreads the work more evenly, but cuts more trees, and each part of a tree repeats its prefix. The result is the
    same in every process, because it depends only on tokens and ids. `branches` is that of `build_tree`.
    """
    packings = [pack(paths, max_tokens=max_tokens, branches=branches)]
    if num_shares == 1:
        return packings
    # Search for the smallest budget that needs no more rounds of micro-batches than `max_tokens` does.
    most = num_shares * math.ceil(len(packings[0]) / num_shares)
    sizes = _sizes(paths, packings[0], branches)
    low, high = math.ceil(sum(sizes) / most), min(max_tokens, max(sizes))
    while high - low > 1 + low * _PRECISION:
        budget = (low + high) // 2
        packings.append(pack(paths, max_tokens=budget, branches=branches))
        if len(packings[-1]) <= most:
            high = budget
        else:
            low = budget
    dealt = []
    for packed in packings:
        sizes = _sizes(paths, packed, branches)
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


def _sizes(paths: Sequence[SamplePath], packed: Sequence[list[int]], branches: bool) -> list[int]:
    return [count_tree_tokens([paths[index] for index in indices], branches=branches) for indices in packed]


def count_tree_tokens(paths: Sequence[SamplePath], *, branches: bool = True) -> int:
    """Count the tokens in the prefix tree of `paths` without building the tree."""
    _, shared = sort_paths(paths, branches=branches)
    return sum(path.num_tokens for path in paths) - sum(shared)
