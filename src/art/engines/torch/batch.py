"""The input of one forward pass: a packed batch of tokens from many requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from art.engines.torch import cache_attention as attention
from art.engines.torch.cache_attention import AttentionPlan, slice_or_index, to_device
from art.engines.torch.kv_cache import Ints, Slot
from art.engines.torch.linear import Run
from art.engines.torch.scheduler import Work


@dataclass(slots=True)
class Batch:
    """The input of one forward pass: N tokens of several requests. Tokens of one adapter are contiguous.

    Example: two requests decode, a prompt of 3 tokens starts, all with adapter A
        token_ids    [41, 7, 1, 8, 9]
        positions    [12, 5, 0, 1, 2]
        runs         [Run(0, 5, A)]
        sample_rows  [0, 1, 4]
        head_runs    [Run(0, 3, A)]
    """

    token_ids: Tensor  # [N]
    positions: Tensor  # [N]
    plan: AttentionPlan
    runs: list[Run] = field(default_factory=list)
    sample_rows: Tensor | None = None
    """Indices of the tokens whose logits are computed, ascending; `None` for all."""
    head_runs: list[Run] = field(default_factory=list)
    """The ranges of `runs` counted in `sample_rows`, for the output layer."""


def build_batch(work: list[Work], device: str, dtype: torch.dtype) -> Batch:
    """Pack the tokens of `work` (ordered by adapter) into one batch, and mark them as computed in the KV cache."""
    like = torch.empty(0, dtype=dtype, device=device)
    ids: list[int] = []
    starts: list[int] = []
    for item in work:
        request, first = item.request, item.request.num_computed
        starts.append(len(ids))
        if item.num_tokens == 1:
            ids.append(request.token_ids[first])
        else:
            ids += request.token_ids[first : first + item.num_tokens]
    counts = np.array([w.num_tokens for w in work])
    offsets = np.array([w.request.num_computed for w in work])
    token_ids = np.array(ids)
    plan, positions = _plan_attention(work, np.array(starts), counts, offsets, token_ids, like)
    num_sampled = [w.num_tokens if w.request.scores else int(w.reaches_end) for w in work]
    sample_rows = None
    if sum(num_sampled) != len(ids):
        ends = zip(starts, counts.tolist(), num_sampled, strict=True)
        sampled = [np.arange(start + count - n, start + count) for start, count, n in ends]
        sample_rows = to_device(np.concatenate(sampled), like)
    return Batch(
        token_ids=to_device(token_ids, like),
        positions=to_device(positions, like),
        plan=plan,
        runs=_runs(work, counts.tolist()),
        sample_rows=sample_rows,
        head_runs=_runs(work, num_sampled),
    )


def _plan_attention(
    work: list[Work], starts: Ints, counts: Ints, offsets: Ints, token_ids: Ints, like: Tensor
) -> tuple[AttentionPlan, Ints]:
    """The attention plan, and the position of each token [N]. `starts`, `counts`, `offsets` are per item of `work`."""
    slots: list[Slot] = [w.request.slot for w in work if w.request.slot is not None]
    rows = np.array([slot.row for slot in slots])
    plan = AttentionPlan()
    item_of, positions = starts, offsets  # [N], if every item has one token
    if len(token_ids) > len(work):
        item_of = np.repeat(np.arange(len(work)), counts)
        positions = np.arange(len(token_ids)) + (offsets - starts)[item_of]
        for i in np.flatnonzero(counts > 1).tolist():
            start, count, slot = int(starts[i]), int(counts[i]), slots[i]
            plan.prefill.append(attention.PrefillSegment(start, start + count, int(offsets[i]), slot.pool, slot.row))
    for pool in dict.fromkeys(slot.pool for slot in slots):
        items = np.array([i for i, slot in enumerate(slots) if slot.pool is pool])
        decoding = items[counts[items] == 1]
        if len(decoding):
            group = attention.decode_group(pool, starts[decoding], rows[decoding], offsets[decoding], like)
            plan.decode.append(group)
        tokens = np.arange(len(token_ids))
        if len(items) < len(work):
            tokens = tokens[np.isin(item_of, items)]
        token_rows, token_positions = rows[item_of[tokens]], positions[tokens]
        pool.record(token_rows, token_positions, token_ids[tokens])
        where = slice_or_index(tokens, like)
        plan.writes.append(attention.Write(pool, where, to_device(token_rows, like), to_device(token_positions, like)))
    return plan, positions


def _runs(work: list[Work], counts: list[int]) -> list[Run]:
    """Maximal runs of rows with one adapter, where item i of `work` has `counts[i]` rows."""
    first = work[0].request.adapter
    if work[-1].request.adapter is first:  # ordered by adapter, so there is only one
        return [] if first is None else [Run(0, sum(counts), first)]
    runs: list[Run] = []
    row = 0
    for adapter, items in groupby(zip(work, counts, strict=True), key=lambda item: item[0].request.adapter):
        num_rows = sum(count for _, count in items)
        if adapter is not None and num_rows:
            runs.append(Run(row, row + num_rows, adapter))
        row += num_rows
    return runs
