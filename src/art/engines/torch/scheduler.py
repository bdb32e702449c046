"""Choose the tokens that the next step, a forward pass, computes: continuous batching with a prefill budget.

    submit -> waiting --admit--> running --finish / cancel--> gone (the cache keeps its slot)
                 ^                  |
                 +---- preempt -----+   when the cache has no room for a running request to grow

Every running request that decodes is part of every step. Prompts share a budget of `prefill_tokens` per step and are
split into chunks to fit it, so a long prompt delays other requests by at most that much work per step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from art.engine import GenerateRequest
from art.engines.torch.cache.kv_cache import KVCache, Slot
from art.engines.torch.weights.linear import Adapter

RECENT = 256
"""Number of ended requests from which the length of new ones is estimated."""
EXPECTED_SHARE = 0.9
"""Quantile of recent completion lengths that is used as the expected length of a new request."""
MIN_AWAITED_PREFIX = 16
"""A request waits for a prefix that another one is computing now, if that saves at least this many tokens."""
FIRST_EXPECTED = 64
"""Expected length before any request has ended."""


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

    def __post_init__(self) -> None:
        self.num_prompt = len(self.params.prompt_token_ids) - self.scores
        self.token_ids = self.params.prompt_token_ids[: self.num_prompt]

    @property
    def uid(self) -> int:
        return self.adapter.uid if self.adapter is not None else 0

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - self.num_prompt


@dataclass(slots=True)
class Work:
    """The next `num_tokens` tokens of a request, to compute in this forward pass."""

    request: Request
    num_tokens: int

    @property
    def reaches_end(self) -> bool:
        return self.request.num_computed + self.num_tokens == len(self.request.token_ids)


class Scheduler:
    """Holds the waiting and running requests, and chooses the tokens that each forward pass computes."""

    def __init__(self, cache: KVCache, *, max_running: int, prefill_tokens: int, score_tokens: int) -> None:
        self.cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._score_tokens = score_tokens
        """Most tokens of a scoring request in one step. Each of them needs a row of logits."""
        self._recent: deque[int] = deque([FIRST_EXPECTED], maxlen=RECENT)
        """Numbers of tokens that the last requests sampled."""

    def schedule(self) -> list[Work]:
        """Choose the tokens to compute in this forward pass. The result is ordered by adapter."""
        for request in list(self.running):
            if request.slot is not None:  # else a request earlier in this loop has just displaced it
                self._make_room(request)
        work = []
        budget = self._prefill_tokens
        for request in self.running:
            pending = len(request.token_ids) - request.num_computed
            if pending > 1:
                pending = min(pending, budget, self._score_tokens if request.scores else pending)
                budget -= pending
            if pending:
                work.append(Work(request, pending))
        self._admit(budget, work)
        if any(w.request.adapter is not work[0].request.adapter for w in work):
            work.sort(key=lambda w: w.request.uid)
        return work

    def remove(self, request: Request, *, wipe: bool = False) -> None:
        """Remove a waiting or running request. Its slot becomes reusable; `wipe` it if it may hold NaN."""
        if not request.scores:
            self._recent.append(request.num_sampled)
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

    def _admit(self, budget: int, work: list[Work]) -> None:
        """Move waiting requests to `running` and `work` as long as `max_running`, slots and budget allow."""
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
            slot = self.cache.acquire(request.uid, tokens, match, len(tokens) + self._expected_new(request))
            if slot is None:
                self.waiting.appendleft(request)
                break
            request.slot, request.num_computed = slot, slot.num_computed
            if request.num_cached is None:
                request.num_cached = slot.num_computed
            self.running.append(request)
            pending = len(tokens) - slot.num_computed
            pending = min(pending, budget, self._score_tokens if request.scores else pending)
            budget -= pending
            work.append(Work(request, pending))
        self.waiting.extendleft(reversed(skipped))

    def _expected_new(self, request: Request) -> int:
        """Expected number of tokens that `request` will still sample."""
        usual = sorted(self._recent)[int(EXPECTED_SHARE * (len(self._recent) - 1))]
        return max(0, min(request.max_new, usual) - request.num_sampled)

    def _make_room(self, request: Request) -> None:
        """Grow the slot of a running request if it is full, and preempt the youngest requests until it fits."""
        while request.slot is not None and not self.cache.grow(request.slot, len(request.token_ids)):
            youngest = self.running.pop()
            assert youngest.slot is not None
            self._vacate(youngest, youngest.slot, wipe=False)
            self.waiting.appendleft(youngest)
            self.num_preemptions += 1
