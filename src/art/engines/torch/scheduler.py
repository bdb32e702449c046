"""Which tokens the next step computes: continuous batching with a prefill budget.

    submit -> waiting --admit--> running --finish / cancel--> gone (its slot stays in the cache)
                 ^                  |
                 +---- preempt -----+   when the cache has no room for a running sequence to grow

Every running sequence that decodes is in every step. Prompts share a budget of `prefill_tokens` per step, in chunks if
need be, so that a long prompt delays the others by at most that much work.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from art.engine import GenerateRequest
from art.engines.torch.attention import (
    AttentionPlan,
    PrefillSegment,
    Write,
    decode_group,
    slice_or_index,
    to_device,
)
from art.engines.torch.batch import Batch
from art.engines.torch.kv_cache import KVCache, Pool, Slot
from art.engines.torch.linear import Adapter, Run


@dataclass(slots=True, eq=False)
class Sequence:
    """A request from submission to its last token. A scoring request samples nothing: it wants every log-prob."""

    request: GenerateRequest
    adapter: Adapter | None
    stream: bool
    max_new: int
    """Tokens that it may sample within `max_tokens` and the context."""
    stop: frozenset[int]
    scores: bool = False
    token_ids: list[int] = field(default_factory=list)
    """Prompt and sampled tokens."""
    num_prompt: int = 0
    slot: Slot | None = None
    num_computed: int = 0
    """Tokens of `token_ids` whose keys and values are in the slot."""
    num_cached: int | None = None
    """Prompt tokens that were not computed for this request; set when it is first admitted."""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    num_sent: int = 0

    @property
    def uid(self) -> int:
        return self.adapter.uid if self.adapter is not None else 0

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - self.num_prompt


@dataclass(slots=True)
class Work:
    """`num_tokens` of a sequence, which lie at `start` in the batch."""

    sequence: Sequence
    num_tokens: int
    start: int = 0

    @property
    def reaches_end(self) -> bool:
        return self.sequence.num_computed + self.num_tokens == len(self.sequence.token_ids)


class Scheduler:
    """The waiting and running sequences, and their slots."""

    def __init__(self, cache: KVCache, *, max_running: int, prefill_tokens: int, score_tokens: int) -> None:
        self.cache = cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._score_tokens = score_tokens
        """Tokens of a scoring request in one step: each has a row of logits."""

    def schedule(self) -> list[Work]:
        """What to compute now, ordered by adapter."""
        for sequence in list(self.running):
            if sequence.slot is not None:  # else an earlier one of this loop has just displaced it
                self._make_room(sequence)
        work = []
        budget = self._prefill_tokens
        for sequence in self.running:
            pending = len(sequence.token_ids) - sequence.num_computed
            if pending > 1:
                pending = min(pending, budget, self._score_tokens if sequence.scores else pending)
                budget -= pending
            if pending:
                work.append(Work(sequence, pending))
        budget = self._admit(budget, work)
        if len({w.sequence.uid for w in work}) > 1:
            work.sort(key=lambda w: w.sequence.uid)
        return work

    def remove(self, sequence: Sequence, *, wipe: bool = False) -> None:
        """Take a sequence out, wherever it is; its slot becomes reusable, or is wiped if it may hold NaN."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if wipe:
            self.cache.discard(sequence.slot, wipe=True)
        else:
            self.cache.release(sequence.slot)
        sequence.slot = None

    def _admit(self, budget: int, work: list[Work]) -> int:
        """Move waiting sequences to running while there are seats, slots and budget."""
        skipped: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) + len(skipped) < self._max_running:
            sequence = self.waiting.popleft()
            tokens = np.array(sequence.token_ids, dtype=np.int32)
            match = self.cache.match(sequence.uid, tokens)
            if match.worth_waiting and not sequence.scores:
                skipped.append(sequence)  # a group's prompt is computed once: by its first request, now
                continue
            if sequence.scores:
                match.length, match.in_place = 0, False  # every position's logits are wanted
            slot = self.cache.acquire(sequence.uid, tokens, match)
            if slot is None:
                self.waiting.appendleft(sequence)
                break
            sequence.slot, sequence.num_computed = slot, slot.num_computed
            if sequence.num_cached is None:
                sequence.num_cached = slot.num_computed
            self.running.append(sequence)
            pending = len(tokens) - slot.num_computed
            pending = min(pending, budget, self._score_tokens if sequence.scores else pending)
            budget -= pending
            work.append(Work(sequence, pending))
        self.waiting.extendleft(reversed(skipped))
        return budget

    def _make_room(self, sequence: Sequence) -> None:
        """Grow the slot of a running sequence if it is full, displacing the youngest sequences until it fits."""
        while sequence.slot is not None and not self.cache.grow(sequence.slot, len(sequence.token_ids)):
            youngest = self.running.pop()
            assert youngest.slot is not None
            self.cache.release(youngest.slot)
            youngest.slot, youngest.num_computed = None, 0
            self.waiting.appendleft(youngest)
            self.num_preemptions += 1


def build_batch(work: list[Work], device: str, dtype: torch.dtype) -> Batch:
    """Lay `work` out as one packed batch, and mark its tokens as computed in the cache's books."""
    like = torch.empty(0, dtype=dtype, device=device)
    plan = AttentionPlan()
    ids: list[int] = []
    slots: list[Slot] = []
    for item in work:
        sequence, slot = item.sequence, item.sequence.slot
        assert slot is not None
        slots.append(slot)
        item.start, first = len(ids), sequence.num_computed
        if item.num_tokens == 1:
            ids.append(sequence.token_ids[first])
        else:
            ids += sequence.token_ids[first : first + item.num_tokens]
            plan.prefill.append(PrefillSegment(item.start, len(ids), offset=first, pool=slot.pool, row=slot.row))
    starts = np.array([w.start for w in work])  # [items], as are the next three
    counts = np.array([w.num_tokens for w in work])
    offsets = np.array([w.sequence.num_computed for w in work])
    rows = np.array([slot.row for slot in slots])
    item_of = np.repeat(np.arange(len(work)), counts)  # [N]
    token_ids = np.array(ids, dtype=np.int64)  # [N]
    positions = np.arange(len(ids)) - starts[item_of] + offsets[item_of]  # [N]
    for pool, members in _by_pool(slots):
        decoding = members[counts[members] == 1]
        if len(decoding):
            plan.decode.append(decode_group(pool, starts[decoding], rows[decoding], offsets[decoding], like))
        mine = np.arange(len(ids)) if len(members) == len(work) else np.flatnonzero(np.isin(item_of, members))
        pool.record(rows[item_of[mine]], positions[mine], token_ids[mine])
        plan.writes.append(
            Write(
                pool, slice_or_index(mine, like), to_device(rows[item_of[mine]], like), to_device(positions[mine], like)
            )
        )
    num_sampled = [w.num_tokens if w.sequence.scores else int(w.reaches_end) for w in work]
    sample_rows = None
    if sum(num_sampled) != len(ids):
        ends = starts + counts
        sampled = [np.arange(end - n, end) for end, n in zip(ends.tolist(), num_sampled, strict=True)]
        sample_rows = to_device(np.concatenate(sampled), like)
    return Batch(
        token_ids=to_device(token_ids, like),
        positions=to_device(positions, like),
        plan=plan,
        runs=_runs(work, counts.tolist()),
        sample_rows=sample_rows,
        head_runs=_runs(work, num_sampled),
    )


def _by_pool(slots: list[Slot]) -> list[tuple[Pool, npt.NDArray[np.int64]]]:
    """The pools in use, each with the indices of its items."""
    members: dict[Pool, list[int]] = {}
    for i, slot in enumerate(slots):
        members.setdefault(slot.pool, []).append(i)
    return [(pool, np.array(indices)) for pool, indices in members.items()]


def _runs(work: list[Work], counts: list[int]) -> list[Run]:
    """Maximal runs of rows with one adapter, where item i of `work` has `counts[i]` rows."""
    runs: list[Run] = []
    row = 0
    for item, count in zip(work, counts, strict=True):
        adapter = item.sequence.adapter
        if adapter is not None and count:
            if runs and runs[-1].adapter is adapter and runs[-1].end == row:
                runs[-1] = Run(runs[-1].start, row + count, adapter)
            else:
                runs.append(Run(row, row + count, adapter))
        row += count
    return runs
