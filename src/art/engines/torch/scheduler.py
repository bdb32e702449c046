"""Choose the tokens that the next step, a forward pass, computes: continuous batching with a prefill budget.

    submit -> waiting --admit--> running --finish / cancel--> gone (the cache keeps its slot)
                 ^                  |
                 +---- preempt -----+   when the cache has no room for a running request to grow

Prompts share a budget of `prefill_tokens` per step and are split into chunks to fit it, so a long prompt delays other
requests by at most that much work per step. A sender that needs less than an equal part of the budget gets what it
needs, and the others get equal parts of the rest. Where not all fit, the sender that runs the fewest requests is
admitted first, and the one that runs the most preempted first.

Work is counted in tokens: a token that attends to many keys counts as several, and a step counts as some by itself.
Every running request that decodes is part of a step, except while a sender asks for little beside one that asks for
much. Then the two take turns:

    step of all | steps of the light senders only, until they have had as much work | step of all | ...

So a short chat waits for one step of a flood, and not for one at each of its tokens.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from art.engine import GenerateRequest, Sender, Timings
from art.engines.torch.kv_cache import KVCache, Slot
from art.engines.torch.linear import Adapter
from art.engines.torch.sampler import Cut, cut_of
from art.kernels.grammar import Matcher

RECENT = 256
"""Number of ended requests from which the length of new ones is estimated."""
EXPECTED_SHARE = 0.9
"""Quantile of recent completion lengths that is used as the expected length of a new request."""
MIN_AWAITED_PREFIX = 16
"""A request waits for a prefix that another one is computing now, if that saves at least this many tokens."""
FIRST_EXPECTED = 64
"""Expected length before any request has ended."""
LIGHT = 8
"""A sender is light if another one has at least this many times as much work. While such a sender is there, prompts of
each other sender get at most this part of the budget."""
LIGHT_STEPS = 256
"""Steps for which prompts keep to that part after a light sender has gone: it may come again."""
STEP_COST = 64
"""Work of a step by itself, and of a request that decodes until its end, in tokens."""


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

    def __init__(
        self, cache: KVCache, *, max_running: int, prefill_tokens: int, score_tokens: int, keys_per_token: int
    ) -> None:
        """
        Args:
            prefill_tokens: most work on prompts in one step.
            score_tokens: most tokens of a scoring request in one step. Each of them needs a row of logits.
            keys_per_token: number of keys to which attending takes as much work as the rest of a token.
        """
        self.cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._score_tokens = score_tokens
        self._keys_per_token = keys_per_token
        self._light_steps = 0
        """Steps for which prompts still keep to a part of the budget."""
        self._owed = 0
        """Work of the last step of all senders, less what light ones have had since."""
        self._recent: deque[int] = deque([FIRST_EXPECTED], maxlen=RECENT)
        """Numbers of tokens that the last requests sampled."""

    def schedule(self) -> list[Work]:
        """Choose the tokens to compute in this forward pass. The result is ordered by adapter."""
        for request in list(self.running):
            if request.slot is not None:  # else a request earlier in this loop has just displaced it
                self._make_room(request)
        senders = {request.params.sender for request in itertools.chain(self.running, self.waiting)}
        light = self._light() if len(senders) > 1 else set()
        if light and not self._light_steps:  # a newcomer is first
            self._owed = STEP_COST + self._prefill_tokens
        self._light_steps = LIGHT_STEPS if light else max(0, self._light_steps - 1)
        work = self._work_of(light, light) if light and self._owed > 0 else []
        if work:
            self._owed -= self._cost_of(work)
        else:
            work = self._work_of(senders, light)
            self._owed = self._cost_of(work) if self._light_steps else 0
        if any(w.request.adapter is not work[0].request.adapter for w in work):
            work.sort(key=lambda w: w.request.uid)
        return work

    def _light(self) -> set[Sender]:
        """The senders that ask for little beside another one."""
        asked = Counter[Sender]()
        for request in (*self.running, *self.waiting):
            pending = len(request.token_ids) - request.num_computed
            asked[request.sender] += STEP_COST + self._cost(request.num_computed, pending)
        most = max(asked.values(), default=0) / LIGHT
        return {sender for sender, work in asked.items() if work <= most}

    def _work_of(self, senders: set[Sender], light: set[Sender]) -> list[Work]:
        """The next tokens of the requests of these senders, some of which may be admitted for it."""
        work = []
        running = self.running
        if senders is light:
            running = [request for request in running if request.sender in senders]
        lengths = [len(request.token_ids) - request.num_computed for request in running]
        budgets = self._budgets(senders, light) if self.waiting or max(lengths, default=0) > 1 else {}
        for request, pending in zip(running, lengths, strict=True):
            if pending > 1:
                pending = self._take(request, budgets)
            if pending:
                work.append(Work(request, pending))
        self._admit(budgets, work)
        return work

    def _budgets(self, senders: set[Sender], light: set[Sender]) -> dict[Sender, int]:
        """Work on prompts that this step may do for each of these senders that needs some."""
        if len(senders) == 1:
            return dict.fromkeys(senders, self._prefill_tokens // (LIGHT if self._light_steps and not light else 1))
        needs = Counter[Sender]()
        for request in itertools.chain(self.running, self.waiting):
            pending = len(request.token_ids) - request.num_computed
            if request.sender in senders and (pending > 1 or request.slot is None):
                needs[request.sender] += self._cost(request.num_computed, pending)
        if self._light_steps:
            most = max(1, self._prefill_tokens // LIGHT)
            needs = Counter({s: need if s in light else min(need, most) for s, need in needs.items()})
        left, budgets = self._prefill_tokens, {}
        for i, (sender, need) in enumerate(sorted(needs.items(), key=lambda item: item[1])):
            budgets[sender] = min(need, -(-left // (len(needs) - i)))
            left -= budgets[sender]
        return budgets

    def _take(self, request: Request, budgets: dict[Sender, int]) -> int:
        """Take the next tokens of a prompt from the budget of its sender, and return how many it has room for."""
        first, budget = request.num_computed, budgets[request.sender]
        num_tokens = len(request.token_ids) - first
        if request.scores:
            num_tokens = min(num_tokens, self._score_tokens)
        if self._cost(first, num_tokens) > budget:
            num_tokens = min(num_tokens, budget)
            num_tokens = max(min(num_tokens, 1), num_tokens * budget // max(1, self._cost(first, num_tokens)))
        budgets[request.sender] -= self._cost(first, num_tokens)
        return num_tokens

    def _cost(self, first: int, num_tokens: int) -> int:
        """Work of the tokens `[first, first + num_tokens)` of a sequence."""
        return num_tokens + num_tokens * (2 * first + num_tokens) // (2 * self._keys_per_token)

    def _cost_of(self, work: list[Work]) -> int:
        return STEP_COST + sum(self._cost(item.request.num_computed, item.num_tokens) for item in work)

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
            work.append(Work(request, self._take(request, budgets)))
        self.waiting.extendleft(reversed(skipped))

    def _take_next(self, budgets: dict[Sender, int]) -> Request | None:
        """Remove and return the oldest waiting request of the sender that runs the fewest, of those with a budget."""
        oldest: dict[Sender, Request] = {}
        for request in self.waiting:
            if budgets.get(request.sender, 0) > 0:
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
