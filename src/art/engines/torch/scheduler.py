"""Choose the tokens that the next step, a forward pass, computes, and pack them: continuous batching.

    submit -> waiting --admit--> running --finish / cancel--> gone (the cache keeps its slot)
                 ^                  |
                 +---- preempt -----+   when the cache has no room for a running request to grow

Prompts share a budget of `prefill_tokens` per step and are split into chunks to fit it, so a long prompt delays other
requests by at most that much work per step. Requests are admitted in the order in which they came; who may send how
many is decided before the engine (`Seats`, in `art.runtime.hosting.gated_engine`).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from art.engine import GenerateRequest, Timings
from art.engines.torch import cache_attention as attention
from art.engines.torch.cache_attention import AttentionPlan, slice_or_index, to_device
from art.engines.torch.kv_cache import Ints, KVCache, Slot
from art.engines.torch.linear import Adapter, AdapterRun
from art.engines.torch.sampler import Cut, cut_of
from art.kernels.grammar import Matcher

EXPECTED_NEW = 64
"""Tokens that a request probably still samples, unless it may not: its row of the cache has room for them."""
MIN_AWAITED_PREFIX = 16
"""A request waits for a prefix that another one is computing now, if that saves at least this many tokens."""


@dataclass(slots=True, eq=False)
class Request:
    """State of a request from submission to its last token. A scoring request samples nothing and returns log-probs."""

    params: GenerateRequest
    """The request as the caller made it."""
    adapter: Adapter | None
    stream: bool = False
    max_new: int = 0
    """Largest number of tokens to sample, within `max_tokens` and the model's context."""
    scores: bool = False
    token_ids: list[int] = field(init=False)
    """Prompt and sampled tokens. The last token of a scored path is not read."""
    num_prompt: int = field(init=False)
    slot: Slot | None = None
    num_computed: int = 0
    """Number of tokens in `token_ids` whose keys and values are in the slot."""
    num_cached: int | None = None
    """Prompt tokens that were reused from the cache. Set when the request is first admitted."""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    num_sent: int = 0
    submitted_at: float = field(default_factory=time.perf_counter)
    admitted_at: float | None = None
    """When it was first admitted. This and the other times are readings of `time.perf_counter`."""
    first_token_at: float | None = None
    sent_at: float = float("-inf")
    """When tokens were last sent."""
    matcher: Matcher | None = None
    """Position in the grammar after the last token, for a request with a grammar that is compiled. Preemption does not
    change it."""
    cut: Cut | None = field(init=False)
    kept: list[list[int]] = field(default_factory=list)
    """What each token was drawn from, where the request has a cut: see `TokenChunk.kept`."""

    def __post_init__(self) -> None:
        self.cut = cut_of(self.params)
        self.num_prompt = len(self.params.prompt_token_ids) - self.scores
        self.token_ids = self.params.prompt_token_ids[: self.num_prompt]

    @property
    def uid(self) -> int:
        return self.adapter.uid if self.adapter is not None else 0

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def timings(self, ended_at: float | None) -> Timings:
        """Where the time went, for a request that has sampled a token. `ended_at` is `None` if it goes on."""
        assert self.admitted_at is not None
        assert self.first_token_at is not None
        return Timings(
            queue_s=self.admitted_at - self.submitted_at,
            prefill_s=self.first_token_at - self.admitted_at,
            decode_s=None if ended_at is None else ended_at - self.first_token_at,
        )


@dataclass(slots=True)
class ScheduledTokens:
    """The next `num_tokens` tokens of a request, to compute in this forward pass."""

    request: Request
    num_tokens: int

    @property
    def reaches_end(self) -> bool:
        return self.request.num_computed + self.num_tokens == len(self.request.token_ids)


class Scheduler:
    """Holds the waiting and running requests, and chooses the tokens that each forward pass computes."""

    def __init__(self, cache: KVCache, *, max_running: int, prefill_tokens: int, score_tokens: int) -> None:
        """
        Args:
            prefill_tokens: most work on prompts in one step.
            score_tokens: most tokens of a scoring request in one step. Each of them needs a row of logits.
        """
        self.cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._score_tokens = score_tokens

    def schedule(self) -> list[ScheduledTokens]:
        """Choose the tokens to compute in this forward pass. The result is ordered by adapter."""
        for request in list(self.running):  # a request without a slot was displaced earlier in this loop
            while request.slot is not None and not self.cache.grow(request.slot, len(request.token_ids)):
                youngest = self.running.pop()
                assert youngest.slot is not None
                self._vacate(youngest, youngest.slot, wipe=False)
                self.waiting.appendleft(youngest)
                self.num_preemptions += 1
        budget, work = self._prefill_tokens, []
        for request in self.running:
            num_tokens = len(request.token_ids) - request.num_computed
            if num_tokens > 1:
                num_tokens, budget = self._take(request, budget)
            if num_tokens:
                work.append(ScheduledTokens(request, num_tokens))
        self._admit(budget, work)
        if any(w.request.adapter is not work[0].request.adapter for w in work):
            work.sort(key=lambda w: w.request.uid)
        return work

    def _take(self, request: Request, budget: int) -> tuple[int, int]:
        """Return how many of the next tokens of a prompt fit into the budget, and what they leave of it."""
        limit = min(budget, self._score_tokens) if request.scores else budget
        num_tokens = min(len(request.token_ids) - request.num_computed, limit)
        return num_tokens, budget - num_tokens

    def remove(self, request: Request, *, wipe: bool = False) -> None:
        """Remove a waiting or running request. Its slot becomes reusable; `wipe` it if it may hold NaN."""
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._vacate(request, request.slot, wipe=wipe)

    def _vacate(self, request: Request, slot: Slot, *, wipe: bool) -> None:
        # Before the prompt is complete there were no logits, so its keys may not be finite.
        if wipe or not request.logprobs:
            self.cache.discard(slot, wipe=True)
        else:
            self.cache.release(slot)
        request.slot, request.num_computed = None, 0

    def _admit(self, budget: int, work: list[ScheduledTokens]) -> None:
        """Move waiting requests to `running` and `work` as long as `max_running`, slots and the budget allow."""
        skipped: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) + len(skipped) < self._max_running:
            request = self.waiting.popleft()
            tokens = np.array(request.token_ids, dtype=np.int32)
            match = self.cache.match(request.uid, tokens)
            if match.awaited - match.length >= MIN_AWAITED_PREFIX and not request.scores:
                skipped.append(request)  # its prefix is being computed now for another request of its group
                continue
            if request.scores:
                match.length, match.in_place = 0, False  # the logits of every position are needed
            expected = min(len(tokens) + EXPECTED_NEW, request.num_prompt + request.max_new)
            slot = self.cache.acquire(request.uid, tokens, match, expected)
            if slot is None:
                self.waiting.appendleft(request)
                break
            request.slot, request.num_computed = slot, slot.num_computed
            if request.num_cached is None:
                request.num_cached = slot.num_computed
                request.admitted_at = time.perf_counter()
            self.running.append(request)
            num_tokens, budget = self._take(request, budget)
            work.append(ScheduledTokens(request, num_tokens))
        self.waiting.extendleft(reversed(skipped))


@dataclass(slots=True)
class Batch:
    """The input of one forward pass: N tokens of several requests. Tokens of one adapter are contiguous.

    Example: two requests decode, a prompt of 3 tokens starts, all with adapter A
        token_ids    [41, 7, 1, 8, 9]
        positions    [12, 5, 0, 1, 2]
        runs         [AdapterRun(0, 5, A)]
        sample_rows  [0, 1, 4]
        head_runs    [AdapterRun(0, 3, A)]
    """

    token_ids: Tensor  # [N]
    positions: Tensor  # [N]
    plan: AttentionPlan
    runs: list[AdapterRun] = field(default_factory=list)
    sample_rows: Tensor | None = None
    """Indices of the tokens whose logits are computed, ascending; `None` for all."""
    head_runs: list[AdapterRun] = field(default_factory=list)
    """The ranges of `runs` counted in `sample_rows`, for the output layer."""


def build_batch(work: list[ScheduledTokens], device: str, dtype: torch.dtype) -> Batch:
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
    sample_rows = None  # the last `num_sampled` tokens of each request
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
    work: list[ScheduledTokens], starts: Ints, counts: Ints, offsets: Ints, token_ids: Ints, like: Tensor
) -> tuple[AttentionPlan, Ints]:
    """The attention plan, and the position of each token [N]. `starts`, `counts`, `offsets` are per item of `work`."""
    slots: list[Slot] = [w.request.slot for w in work if w.request.slot is not None]
    rows = np.array([slot.row for slot in slots])
    plan = AttentionPlan()
    item_of, positions = starts, offsets  # [N], if every item has one token
    if len(token_ids) > len(work):  # prompts: each is a segment, which attends by itself
        item_of = np.repeat(np.arange(len(work)), counts)
        positions = np.arange(len(token_ids)) + (offsets - starts)[item_of]
        for i in np.flatnonzero(counts > 1).tolist():
            start, count, slot = int(starts[i]), int(counts[i]), slots[i]
            plan.prefill.append(attention.PrefillSegment(start, start + count, int(offsets[i]), slot.pool, slot.row))
    # A pool is one tensor per layer: its sequences that add one token attend together, and all its tokens are stored.
    for pool in dict.fromkeys(slot.pool for slot in slots):
        items = np.array([i for i, slot in enumerate(slots) if slot.pool is pool])
        decoding = items[counts[items] == 1]
        if len(decoding):
            plan.decode += attention.decode_groups(pool, starts[decoding], rows[decoding], offsets[decoding], like)
        tokens = np.arange(len(token_ids))
        if len(items) < len(work):
            tokens = tokens[np.isin(item_of, items)]
        token_rows, token_positions = rows[item_of[tokens]], positions[tokens]
        pool.record(token_rows, token_positions, token_ids[tokens])
        where = slice_or_index(tokens, like)
        plan.writes.append(attention.Write(pool, where, to_device(token_rows, like), to_device(token_positions, like)))
    return plan, positions


def _runs(work: list[ScheduledTokens], counts: list[int]) -> list[AdapterRun]:
    """Maximal runs of rows with one adapter, where item i of `work` has `counts[i]` rows."""
    first = work[0].request.adapter
    if work[-1].request.adapter is first:  # ordered by adapter, so there is only one
        return [] if first is None else [AdapterRun(0, sum(counts), first)]
    runs: list[AdapterRun] = []
    row = 0
    for adapter, items in groupby(zip(work, counts, strict=True), key=lambda item: item[0].request.adapter):
        num_rows = sum(count for _, count in items)
        if adapter is not None and num_rows:
            runs.append(AdapterRun(row, row + num_rows, adapter))
        row += num_rows
    return runs
