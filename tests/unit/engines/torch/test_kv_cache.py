"""The cache's books, checked against a plain model of what it should hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from art.engines.torch.kv_cache import KVCache, LayerShape, Slot

BUDGET = 3000


def fill(slot: Slot, token_ids: list[int], first: int) -> None:
    """Pretend to compute: the key of a token is a running hash of the sequence up to it."""
    for i in range(first, len(token_ids)):
        slot.pool.keys[0][slot.row, 0, i, 0] = value_at(token_ids, i)
        slot.pool.values[0][slot.row, 0, i, 0] = -value_at(token_ids, i)
    slot.pool.record(
        np.full(len(token_ids) - first, slot.row), np.arange(first, len(token_ids)), np.array(token_ids[first:])
    )


def value_at(token_ids: list[int], i: int) -> float:
    return float(sum((j + 1) * t for j, t in enumerate(token_ids[: i + 1])) % 9973)


class CacheMachine(RuleBasedStateMachine):
    """Acquires, extends, releases and discards; every computed token must carry the key of its own prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(
            [LayerShape(1, 1, 1)], max_context=2000, budget=BUDGET, max_rows=4, dtype=torch.float32, device="cpu"
        )
        self.busy: list[tuple[Slot, list[int]]] = []
        self.idle: list[list[int]] = []

    @rule(
        uid=st.integers(0, 1),
        length=st.sampled_from([1, 3, 40, 255, 256, 257, 600, 1100]),
        seed=st.integers(0, 2),
        cut=st.integers(0, 60),
    )
    def acquire(self, uid: int, length: int, seed: int, cut: int) -> None:
        token_ids = [(seed * 7 + i * i) % 50 for i in range(length)]
        token_ids = token_ids[: max(1, length - cut)] + [50 + cut] * min(cut, 5)
        self.start(uid, token_ids)

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), uid=st.integers(0, 1))
    def next_turn(self, data: st.DataObject, uid: int) -> None:
        history = data.draw(st.sampled_from(self.idle))
        if len(history) < 1990:
            self.start(uid, history + [1, 2, 3])

    def start(self, uid: int, token_ids: list[int]) -> None:
        tokens = np.array(token_ids, dtype=np.int32)
        match = self.cache.match(uid, tokens)
        slot = self.cache.acquire(uid, tokens, match)
        if slot is None:
            assert self.busy, "an empty cache must hold any one sequence"
            return
        assert slot.num_computed < len(token_ids)
        assert slot.uid == uid
        self.check(slot, token_ids[: slot.num_computed])
        fill(slot, token_ids, slot.num_computed)
        self.busy.append((slot, token_ids))

    @precondition(lambda self: self.busy)
    @rule(data=st.data(), count=st.sampled_from([1, 200, 700]))
    def grow(self, data: st.DataObject, count: int) -> None:
        slot, token_ids = data.draw(st.sampled_from(self.busy))
        longer = token_ids + [7] * min(count, 2000 - len(token_ids))
        if self.cache.grow(slot, len(longer)):
            fill(slot, longer, len(token_ids))
            self.busy[[s for s, _ in self.busy].index(slot)] = (slot, longer)

    @precondition(lambda self: self.busy)
    @rule(data=st.data(), discard=st.booleans())
    def end(self, data: st.DataObject, discard: bool) -> None:
        index = data.draw(st.integers(0, len(self.busy) - 1))
        slot, token_ids = self.busy.pop(index)
        if discard:
            self.cache.discard(slot, wipe=True)
        else:
            self.cache.release(slot)
            self.idle.append(token_ids)

    @rule(uid=st.integers(0, 1))
    def forget(self, uid: int) -> None:
        self.cache.forget(uid)
        assert all(s.busy for pool in self.cache.pools for s in pool.slots if s is not None and s.uid == uid)

    @invariant()
    def running_sequences_are_intact(self) -> None:
        for slot, token_ids in self.busy:
            assert slot.pool.slots[slot.row] is slot
            assert slot.num_computed == len(token_ids)
            self.check(slot, token_ids)

    @invariant()
    def budget_holds(self) -> None:
        stats = self.cache.stats()
        assert stats["kv_tokens_allocated"] <= BUDGET
        assert stats["slots_busy"] == len(self.busy)

    @staticmethod
    def check(slot: Slot, token_ids: list[int]) -> None:
        keys = slot.pool.keys[0][slot.row, 0, : len(token_ids), 0].tolist()
        values = slot.pool.values[0][slot.row, 0, : len(token_ids), 0].tolist()
        want = [value_at(token_ids, i) for i in range(0, len(token_ids), 97)]
        assert keys[::97] == want
        assert values[::97] == [-w for w in want]
        assert slot.pool.tokens[slot.row, : len(token_ids)].tolist() == token_ids


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def make(budget: int = 4096, max_rows: int = 100) -> KVCache:
    return KVCache(
        [LayerShape(1, 1, 1)], max_context=1024, budget=budget, max_rows=max_rows, dtype=torch.float32, device="cpu"
    )


def run(cache: KVCache, token_ids: list[int], uid: int = 0) -> int:
    """A whole request; returns how many tokens it reused."""
    tokens = np.array(token_ids, dtype=np.int32)
    slot = cache.acquire(uid, tokens, cache.match(uid, tokens))
    assert slot is not None
    reused = slot.num_computed
    fill(slot, token_ids, reused)
    cache.release(slot)
    return reused


def test_memory_grows_with_use() -> None:
    cache = make()
    assert cache.stats()["kv_tokens_allocated"] == 0
    run(cache, list(range(20)))
    assert cache.stats()["kv_tokens_allocated"] == 8 * 256


@pytest.mark.parametrize(("budget", "capacity"), [(4096, 1024), (512, 256)])
def test_a_row_has_room_for_the_expected_answer_where_there_is_room_for_the_row(budget: int, capacity: int) -> None:
    cache = make(budget)
    tokens = np.arange(200, dtype=np.int32)
    slot = cache.acquire(0, tokens, cache.match(0, tokens), expected=264)
    assert slot is not None
    assert slot.pool.capacity == capacity


def test_the_least_recently_used_slot_goes_first() -> None:
    cache = make(budget=1024)
    prompts = [[i] * 50 for i in range(4)]
    for prompt in prompts:
        run(cache, prompt)
    run(cache, prompts[0] + [9])
    run(cache, [77] * 50)  # displaces prompt 1, which is now the oldest
    assert run(cache, prompts[0] + [9, 9]) == 51
    assert run(cache, prompts[1]) == 0


def test_idle_slots_are_replaced_before_the_cache_grows_beyond_its_rows() -> None:
    cache = make(max_rows=8)
    for i in range(30):
        run(cache, [i] * 50)
    assert cache.stats()["kv_tokens_allocated"] == 8 * 256


def test_room_moves_between_row_sizes() -> None:
    cache = make(budget=2048)
    for i in range(8):
        run(cache, [i] * 50)
    assert run(cache, [3] * 900) == 50  # the copy's source outlives the others
    assert cache.stats()["kv_tokens_allocated"] <= 2048
    assert run(cache, [3] * 900) == 899


def test_short_common_prefixes_are_not_worth_a_copy() -> None:
    cache = make()
    run(cache, [1, 2, 3, 4, 5])
    assert run(cache, [1, 2, 3, 9]) == 0
    assert run(cache, [1, 2, 3, 4, 9]) == 4
