"""Measure how far the policy has moved from its base model, on a small part of each step.

If a loss compares with the base model, all of its log-probs are known already. Otherwise they are computed for as many
samples as fit into `_BUDGET` of the step's tokens. A forward pass takes a third to a half of the time of training a
token, so the step takes at most about 3 % longer. The samples are neighbours in the prefix tree, starting at a random
place: tokens that they share are computed once, so the budget covers as many targets as possible. If not even the
shortest sample fits (few rollouts with a long prompt), one sample is measured every few steps, and the average cost
stays within the budget. The policy's own log-probs come from the updates, at no cost.
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
"""Share of the step's tree tokens that may be computed for the measurement."""


def with_sampled_base(paths: list[SamplePath], measurer: Measurer, *, step: int) -> list[SamplePath]:
    """Add the base model's log-probs (stream `SAMPLED_BASE`) to some of the samples, unless all have them (`BASE`)."""
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
    """Choose by index the samples whose KL to the base model is measured. A repeated step chooses the same."""
    order, shared = sort_paths(paths)
    ranks = [rank for rank, index in enumerate(order) if paths[index].sample.component == "rl"]
    if not ranks:
        return []
    lengths = [paths[index].num_tokens for index in order]
    budget = _BUDGET * (sum(lengths) - sum(shared))
    every = math.ceil(min(lengths[rank] for rank in ranks) / budget)
    if (step + 1) % every:
        return []
    left = every * budget
    chosen: list[int] = []  # ranks
    first = zlib.crc32(str(step).encode()) % len(ranks)
    for rank in ranks[first:] + ranks[:first]:
        # Two paths share the minimum of what the neighbours between them share.
        is_later = bool(chosen) and chosen[-1] < rank
        cost = lengths[rank] - (min(shared[chosen[-1] + 1 : rank + 1]) if is_later else 0)
        if cost <= left:
            chosen.append(rank)
            left -= cost
        elif chosen:
            break
    return sorted(order[rank] for rank in chosen)
