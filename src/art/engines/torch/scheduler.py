"""Choose the tokens that the next step, a forward pass, computes: continuous batching with a prefill budget.

    submit -> waiting --admit--> running --finish / cancel--> gone (the cache keeps its slot)
                 ^                  |
                 +---- preempt -----+   when the cache has no room for a running request to grow

Every running request that decodes is part of every step. Prompts share a budget of `prefill_tokens` per step and are
split into chunks to fit it, so a long prompt delays other requests by at most that much work per step. A sender that
needs less than an equal part of the budget gets what it needs, and the others get equal parts of the rest. Where not
all fit, the sender that runs the fewest requests is admitted first, and the one that runs the most preempted first.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from art.engine import GenerateRequest, Sender, Timings
from art.engines.torch.cache.kv_cache import KVCache, Slot
from art.engines.torch.truncation import Cut, cut_of
from art.engines.torch.weights.linear import Adapter
from art.kernels.grammar import Matcher

RECENT = 256
"""Number of ended requests from which the length of new ones is estimated."""
EXPECTED_SHARE = 0.9
"""Quantile of recent completion lengths that is used as the expected length of a new request."""
MIN_AWAITED_PREFIX = 16
"""A request waits for a prefix that another one is computing now, if that saves at least this many tokens."""
FIRST_EXPECTED = 64
"""Expected length before any request has ended."""
FEW = 8
"""A sender has few requests if another one has at least this many times as many. While such a sender is there, prompts
of each other sender get at most this part of the budget: every token that it waits for comes after a whole step."""


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
    def sender(self) -> Sender:
        return self.params.sender

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
        lengths = [len(request.token_ids) - request.num_computed for request in self.running]
        budgets = self._budgets() if self.waiting or max(lengths, default=0) > 1 else {}
        for request, pending in zip(self.running, lengths, strict=True):
            if pending > 1:
                pending = min(pending, budgets[request.sender], self._score_tokens if request.scores else pending)
                budgets[request.sender] -= pending
            if pending:
                work.append(Work(request, pending))
        self._admit(budgets, work)
        if any(w.request.adapter is not work[0].request.adapter for w in work):
            work.sort(key=lambda w: w.request.uid)
        return work

    def _budgets(self) -> dict[Sender, int]:
        """Prompt tokens that this step may compute for each sender that needs some."""
        counts, needs = Counter[Sender](), Counter[Sender]()
        for request in itertools.chain(self.running, self.waiting):
            counts[request.sender] += 1
            pending = len(request.token_ids) - request.num_computed
            if pending > 1 or request.slot is None:
                needs[request.sender] += pending
        few = max(counts.values(), default=0) // FEW
        if min(counts.values(), default=0) <= few:
            most = max(1, self._prefill_tokens // FEW)
            needs = Counter({s: need if counts[s] <= few else min(need, most) for s, need in needs.items()})
        left, budgets = self._prefill_tokens, {}
        for i, (sender, need) in enumerate(sorted(needs.items(), key=lambda item: item[1])):
            budgets[sender] = min(need, -(-left // (len(needs) - i)))
            left -= budgets[sender]
        return budgets

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

    def _admit(self, budgets: dict[Sender, int], work: list[Work]) -> None:
        """Move waiting requests to `running` and `work` as long as `max_running`, slots and budgets allow."""
        skipped: list[Request] = []
        while len(self.running) + len(skipped) < self._max_running:
            if (request := self._take_next(budgets)) is None:
                break
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
                request.admitted_at = time.perf_counter()
            self.running.append(request)
            pending = len(tokens) - slot.num_computed
            pending = min(pending, budgets[request.sender], self._score_tokens if request.scores else pending)
            budgets[request.sender] -= pending
            work.append(Work(request, pending))
        self.waiting.extendleft(reversed(skipped))

    def _take_next(self, budgets: dict[Sender, int]) -> Request | None:
        """Remove and return the oldest waiting request of the sender that runs the fewest, of those with a budget."""
        oldest: dict[Sender, Request] = {}
        for request in self.waiting:
            if budgets[request.sender] > 0:
                oldest.setdefault(request.sender, request)
            if len(oldest) == len(budgets):
                break
        if not oldest:
            return None
        running = Counter(request.sender for request in self.running) if len(oldest) > 1 else Counter()
        request = min(oldest.values(), key=lambda request: running[request.sender])
        self.waiting.remove(request)
        return request

    def _expected_new(self, request: Request) -> int:
        """Expected number of tokens that `request` will still sample."""
        usual = sorted(self._recent)[int(EXPECTED_SHARE * (len(self._recent) - 1))]
        return max(0, min(request.max_new, usual) - request.num_sampled)

    def _make_room(self, request: Request) -> None:
        """Grow the slot of a running request if it is full. Until it fits, preempt the sender that runs the most: its
        youngest request."""
        while request.slot is not None and not self.cache.grow(request.slot, len(request.token_ids)):
            counts = Counter(one.sender for one in self.running)
            youngest = next(one for one in reversed(self.running) if counts[one.sender] == max(counts.values()))
            self.running.remove(youngest)
            assert youngest.slot is not None
            self._vacate(youngest, youngest.slot, wipe=False)
            self.waiting.appendleft(youngest)
            self.num_preemptions += 1
