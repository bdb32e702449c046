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

from art.engine import GenerateRequest
from art.engines.torch.cache.kv_cache import KVCache, Slot
from art.engines.torch.weights.linear import Adapter

RECENT = 256
EXPECTED_SHARE = 0.9
"""Of recent sequences, so many were no longer than a new one is expected to become."""
FIRST_EXPECTED = 64
"""Before any has ended."""


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
    """The next `num_tokens` of a sequence."""

    sequence: Sequence
    num_tokens: int

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
        self._recent: deque[int] = deque([FIRST_EXPECTED], maxlen=RECENT)
        """Sampled tokens of the sequences that ended last."""

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
        if any(w.sequence.adapter is not work[0].sequence.adapter for w in work):
            work.sort(key=lambda w: w.sequence.uid)
        return work

    def remove(self, sequence: Sequence, *, wipe: bool = False) -> None:
        """Take a sequence out, wherever it is; its slot becomes reusable, or is wiped if it may hold NaN."""
        if not sequence.scores:
            self._recent.append(sequence.num_sampled)
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._vacate(sequence, sequence.slot, wipe=wipe)

    def _vacate(self, sequence: Sequence, slot: Slot, *, wipe: bool) -> None:
        # A prompt that is not complete has shown no logits yet, so nobody knows that its keys are finite.
        if wipe or not sequence.logprobs:
            self.cache.discard(slot, wipe=True)
        else:
            self.cache.release(slot)
        sequence.slot, sequence.num_computed = None, 0

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
            slot = self.cache.acquire(sequence.uid, tokens, match, len(tokens) + self._expected_new(sequence))
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

    def _expected_new(self, sequence: Sequence) -> int:
        """Tokens that it may still sample: no more than most of the last ones did."""
        usual = sorted(self._recent)[int(EXPECTED_SHARE * (len(self._recent) - 1))]
        return max(0, min(sequence.max_new, usual) - sequence.num_sampled)

    def _make_room(self, sequence: Sequence) -> None:
        """Grow the slot of a running sequence if it is full, displacing the youngest sequences until it fits."""
        while sequence.slot is not None and not self.cache.grow(sequence.slot, len(sequence.token_ids)):
            youngest = self.running.pop()
            assert youngest.slot is not None
            self._vacate(youngest, youngest.slot, wipe=False)
            self.waiting.appendleft(youngest)
            self.num_preemptions += 1
