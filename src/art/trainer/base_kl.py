"""How far the policy has moved from its base: measured in passing, on a small part of the step.

A loss that compares with the base has measured every target already. Else the base's log-probs are computed for as
many samples as fit `_BUDGET` of the step's tokens: forward only, which is a third to a half of what training a token
takes, so a step gets at most about 5 % longer. Where not even the shortest sample fits (few rollouts with a long
prompt), it is measured every so many steps, so that the average keeps to the budget.

The policy's side costs nothing: it is the log-probs that the updates compute anyway.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from art.trainer.tree import SamplePath, sort_paths

if TYPE_CHECKING:
    from art.trainer.prepare import Measure

BASE = "base"
"""The stream of the base's log-probs, and the source that `Measure` knows it by."""

SAMPLED_BASE = "sampled_base"
"""The same of some samples, and NaN for the rest."""

_BUDGET = 1 / 12


def with_sampled_base(paths: list[SamplePath], measure: Measure, *, step: int) -> list[SamplePath]:
    """`paths`, some of them with the base's log-probs as a stream, unless all have them."""
    if all(BASE in path.streams for path in paths):
        return paths
    chosen = choose_paths(paths, step=step)
    if not chosen:
        return paths
    measured = dict(zip(chosen, measure([paths[index] for index in chosen], BASE, SAMPLED_BASE), strict=True))
    return [
        measured.get(index) or path.with_stream(SAMPLED_BASE, np.full_like(path.sampling_logprobs, np.nan))
        for index, path in enumerate(paths)
    ]


def choose_paths(paths: Sequence[SamplePath], *, step: int) -> list[int]:
    """Indices of the samples to measure in `step`: other ones each time, and always the same when it is repeated."""
    candidates = [index for index, path in enumerate(paths) if path.sample.component == "rl"]
    if not candidates:
        return []
    _, shared = sort_paths(paths)
    budget = _BUDGET * (sum(len(path.token_ids) for path in paths) - sum(shared))
    shortest = min(len(paths[index].token_ids) for index in candidates)
    if shortest > budget:
        every = math.ceil(shortest / budget)
        if (step + 1) % every:
            return []
        budget = shortest
    chosen = []
    for index in sorted(candidates, key=lambda index: zlib.crc32(f"{step} {paths[index].sample.sample_id}".encode())):
        if len(paths[index].token_ids) <= budget:
            chosen.append(index)
            budget -= len(paths[index].token_ids)
    return sorted(chosen)
