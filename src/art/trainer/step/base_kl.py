"""How far the policy has moved from its base: measured in passing, on a small part of the step.

A loss that compares with the base has measured every target already. Else the base's log-probs are computed for as
many samples as fit `_BUDGET` of the step's tokens: forward only, which is a third to a half of what training a token
takes, so the device has at most about 3 % more to do. The samples are neighbours in the prefix tree, from a random
place on: what they share is computed once, so that the budget buys as many targets as it can. Where not even the
shortest sample fits (few rollouts with a long prompt), one is measured every so many steps, and the average keeps to
the budget.

The policy's side costs nothing: it is the log-probs that the updates compute anyway.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

from art.trainer.step.measure import Measurer
from art.trainer.streams import BASE, SAMPLED_BASE
from art.trainer.tree.tree import SamplePath, sort_paths

_BUDGET = 1 / 16


def with_sampled_base(paths: list[SamplePath], measurer: Measurer, *, step: int) -> list[SamplePath]:
    """`paths`, some of them with the base's log-probs as a stream, unless all have them."""
    if all(BASE in path.streams for path in paths):
        return paths
    chosen = choose_paths(paths, step=step)
    if not chosen:
        return paths
    sampled = measurer.add_stream([paths[index] for index in chosen], BASE, SAMPLED_BASE)
    measured = dict(zip(chosen, sampled, strict=True))
    return [
        measured.get(index) or path.with_stream(SAMPLED_BASE, np.full_like(path.sampling_logprobs, np.nan))
        for index, path in enumerate(paths)
    ]


def choose_paths(paths: Sequence[SamplePath], *, step: int) -> list[int]:
    """Indices of the samples to measure in `step`: other ones each time, and always the same when it is repeated."""
    order, shared = sort_paths(paths)
    ranks = [rank for rank, index in enumerate(order) if paths[index].sample.component == "rl"]
    if not ranks:
        return []
    lengths = [len(paths[index].token_ids) for index in order]
    budget = _BUDGET * (sum(lengths) - sum(shared))
    every = math.ceil(min(lengths[rank] for rank in ranks) / budget)
    if (step + 1) % every:
        return []
    left = every * budget
    chosen: list[int] = []  # ranks
    first = zlib.crc32(str(step).encode()) % len(ranks)
    for rank in ranks[first:] + ranks[:first]:
        # What two paths share is the least that any two neighbours between them do.
        is_later = bool(chosen) and chosen[-1] < rank
        cost = lengths[rank] - (min(shared[chosen[-1] + 1 : rank + 1]) if is_later else 0)
        if cost <= left:
            chosen.append(rank)
            left -= cost
        elif chosen:
            break
    return sorted(order[rank] for rank in chosen)
