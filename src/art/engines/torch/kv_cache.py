"""The KV cache: dense slots that outlive their request.

A slot is one row of a pool. The key and value of token i of its sequence are at index i of that row. Pools differ in
the capacity of their rows (256, 1024, 4096 ... tokens), so one long sequence does not make every row long. A sequence
that outgrows its row moves to the next pool. Rows are allocated when they are needed, up to a budget in tokens.

When a request ends, its slot keeps its content until the memory is needed (least recently used first). A later request
- continues in place, if its prompt extends everything in an idle slot (the next turn of a conversation);
- or starts from a copy of the longest prefix in any slot, idle or running (the shared prompt of a group).
Keys and values belong to one adapter, by its uid. Those that were computed with other weights are never reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

SMALLEST_CAPACITY = 256
CAPACITY_FACTOR = 4
FIRST_ROWS = 8
MAX_GROWTH_TOKENS = 16_384
"""Most tokens to allocate ahead of need, so that long rows are only allocated one by one."""
MIN_SHARED_PREFIX = 4
"""Shorter common prefixes are computed again instead of copied."""
SHARING_COST = 1_000_000
"""What reading a prefix once for several sequences costs per layer and step, in bytes of keys and values that could be
read in that time (about 100 microseconds of one CPU core)."""
PREFIX_READS = 3
"""How often the keys of a shared prefix are moved: read, written beside those of other prefixes, and read again."""


@dataclass(slots=True, eq=False)
class Slot:
    """One row of a pool. It holds the keys and values of one sequence, whose request runs or has ended."""

    pool: Pool
    row: int
    uid: int

    @property
    def busy(self) -> bool:
        """Whether a running request uses the slot."""
        return bool(self.pool.busy[self.row])

    @property
    def num_computed(self) -> int:
        return int(self.pool.num_computed[self.row])


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one token's keys and values in one layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of sequences that begin with the same `length` tokens, such as the rollouts of one prompt."""

    length: int
    members: Ints  # [n] the sequences of all groups, ascending
    rows: Tensor  # [groups] a row that begins with the prefix of the group
    queries: Tensor  # [groups * places] member in each place; all groups have as many places as the largest needs
    places: Tensor  # [n] place of each member


class Pool:
    """KV cache rows of one capacity. Keys and values are head-major, so attention reads contiguous memory of a row."""

    def __init__(self, capacity: int, shapes: Sequence[LayerShape], dtype: torch.dtype, device: str) -> None:
        self.capacity = capacity
        self.slots: list[Slot | None] = []

        def empty(num_kv_heads: int, width: int) -> Tensor:
            return torch.zeros((0, num_kv_heads, capacity, width), dtype=dtype, device=device)

        self.keys = [empty(s.num_kv_heads, s.key_dim) for s in shapes]  # per layer [rows, kv heads, capacity, d]
        self.values = [empty(s.num_kv_heads, s.value_dim) for s in shapes]
        self.tokens = np.zeros((0, capacity), dtype=np.int32)  # [rows, capacity]
        self.uids = np.zeros(0, dtype=np.int64)  # [rows] adapter whose weights computed the row; -1 for a free row
        self.busy = np.zeros(0, dtype=np.bool_)  # [rows]
        self.last_used = np.zeros(0, dtype=np.int64)  # [rows] time (a counter) at which an idle row was released
        self.num_known = np.zeros(0, dtype=np.int64)  # [rows] number of tokens in `tokens`
        self.num_computed = np.zeros(0, dtype=np.int64)  # [rows] number of tokens whose key and value are computed
        self._num_changes = 0  # how often a row was given another sequence
        self._shared: tuple[tuple[int, bytes], SharedPrefixes | None] | None = None  # for these changes and rows

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    def resize(self, keep: list[int], num_rows: int) -> None:
        """Keep the rows `keep`, moved to the front, and change the number of rows to `num_rows`."""
        self._num_changes += 1
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = old.new_zeros((num_rows, *old.shape[1:]))
                kept = torch.tensor(keep, dtype=torch.int64, device=old.device)
                torch.index_select(old, 0, kept, out=new[: len(keep)])
                tensors[layer] = new
        fresh = num_rows - len(keep)
        self.tokens = np.pad(self.tokens[keep], ((0, fresh), (0, 0)))
        self.uids = np.pad(self.uids[keep], (0, fresh), constant_values=-1)
        self.busy = np.pad(self.busy[keep], (0, fresh))
        numbers = self.last_used, self.num_known, self.num_computed
        self.last_used, self.num_known, self.num_computed = (np.pad(n[keep], (0, fresh)) for n in numbers)
        self.slots = [self.slots[row] for row in keep] + [None] * fresh
        for row, slot in enumerate(self.slots):
            if slot is not None:
                slot.row = row

    def put(self, slot: Slot, row: int) -> None:
        """Assign the free row `row` to `slot`, with no content yet."""
        slot.pool, slot.row = self, row
        self.slots[row] = slot
        self.uids[row], self.busy[row] = slot.uid, True
        self.num_known[row] = self.num_computed[row] = 0

    def start(self, row: int, tokens: npt.NDArray[np.int32], num_computed: int) -> None:
        """Begin a sequence with `tokens` in `row`, of which the cache has `num_computed`."""
        self._num_changes += 1
        self.busy[row] = True
        self.tokens[row, : len(tokens)] = tokens
        self.num_known[row], self.num_computed[row] = len(tokens), num_computed

    def clear(self, row: int) -> None:
        """Mark the row `row` as free, without content."""
        self.slots[row] = None
        self.uids[row], self.busy[row] = -1, False
        self.num_known[row] = self.num_computed[row] = 0

    def record(self, rows: Ints, positions: Ints, token_ids: Ints) -> None:
        """Note that the rows now hold these tokens. All arguments are [n]; positions of the same row must ascend."""
        self.tokens[rows, positions] = token_ids
        self.num_computed[rows] = positions + 1  # for equal rows the last assignment counts
        self.num_known[rows] = np.maximum(self.num_known[rows], positions + 1)

    def common_prefixes(self, rows: Ints, tokens: npt.NDArray[np.int32]) -> Ints:
        """Length of the prefix that each row has in common with `tokens`: [len(rows)]."""
        width = min(self.capacity, len(tokens))
        differs = self.tokens[rows, :width] != tokens[:width]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        return np.minimum(first, self.num_known[rows])

    def shared_prefixes(self, rows: Ints, positions: Ints) -> SharedPrefixes | None:
        """The prefix to read once for several of the sequences in `rows` [n], whose next tokens are at `positions` [n].

        `None` if that saves nothing. The result is kept until other rows ask, or one of them changes its sequence.
        """
        key = self._num_changes, rows.tobytes()
        if self._shared is None or self._shared[0] != key:
            self._shared = key, self._find_shared(rows, positions)
        return self._shared[1]

    def _find_shared(self, rows: Ints, positions: Ints) -> SharedPrefixes | None:
        layers = list(zip(self.keys, self.values, strict=True))
        if self.keys[0].device.type != "cpu" or any(k.shape != v.shape for k, v in layers):
            return None  # the operator that also returns the sums of the softmax is the CPU's, for equal widths
        width = int(positions.max())
        least_saved = SHARING_COST // max(2 * k.shape[1] * k.shape[3] * k.itemsize for k in self.keys)
        if (len(rows) - PREFIX_READS) * width <= least_saved:
            return None
        tokens, uids = self.tokens[rows, :width], self.uids[rows]
        sequences = [(int(uid), row.tobytes()) for uid, row in zip(uids, tokens, strict=True)]
        order = np.array(sorted(range(len(rows)), key=sequences.__getitem__))  # longest common prefixes side by side
        tokens, uids, known = tokens[order], uids[order], positions[order]
        differs = tokens[1:] != tokens[:-1]
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        common = np.minimum(np.where(uids[1:] == uids[:-1], common, 0), np.minimum(known[1:], known[:-1]))
        best: tuple[int, list[Ints]] = 0, []
        # A shorter prefix may have fewer and larger groups: a system prompt of all, or the whole prompt of each.
        for length in np.unique(common).tolist():
            groups = np.split(order, np.flatnonzero(common < length) + 1)
            groups = [np.sort(group) for group in groups if len(group) > PREFIX_READS]
            saved = length * sum(len(group) - PREFIX_READS for group in groups)
            if saved > least_saved:
                best, least_saved = (length, groups), saved
        length, groups = best
        if not groups:
            return None
        members = np.sort(np.concatenate(groups))
        num_places = max(map(len, groups))
        queries, places = np.zeros((len(groups), num_places), np.int64), np.empty_like(members)
        for i, group in enumerate(groups):
            own = np.searchsorted(members, group)
            queries[i, : len(own)] = own
            places[own] = i * num_places + np.arange(len(own))
        first_rows = rows[[group[0] for group in groups]]
        return SharedPrefixes(length, members, *map(torch.from_numpy, (first_rows, queries.ravel(), places)))

    def copy_prefix(self, source: Slot, row: int, length: int) -> None:
        """Copy keys and values of the first `length` tokens from a slot of any pool to `row`."""
        pool = source.pool
        for new, old in zip((*self.keys, *self.values), (*pool.keys, *pool.values), strict=True):
            new[row, :, :length] = old[source.row, :, :length]


@dataclass(slots=True)
class PrefixMatch:
    """Result of a search in the KV cache for the longest prefix of a prompt."""

    slot: Slot | None = None
    length: int = 0
    """Number of tokens whose keys and values can be reused from `slot`."""
    in_place: bool = False
    """Whether the slot is idle and holds nothing but this prefix."""
    awaited: int = 0
    """Number of tokens that could be reused once a running request has computed its prompt."""


class KVCache:
    """Keys and values of all sequences, in slots.

    `budget` limits the tokens of all rows together; it must allow one row of `max_context`.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        max_context: int,
        budget: int,
        max_rows: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        capacities = [SMALLEST_CAPACITY * CAPACITY_FACTOR**i for i in range(12)]
        capacities = [capacity for capacity in capacities if capacity < max_context] + [max_context]
        self.pools = [Pool(capacity, shapes, dtype, device) for capacity in capacities]
        self.budget = budget
        self._max_rows = max_rows
        """From this number of rows on, idle slots are evicted before new rows are allocated."""
        self._clock = 0

    def acquire(self, uid: int, tokens: npt.NDArray[np.int32], match: PrefixMatch, expected: int = 0) -> Slot | None:
        """Take a slot for a sequence that starts with `tokens`, filled with what could be reused (never all tokens).

        Args:
            match: the current result of `match(uid, tokens)`.
            expected: length that the sequence will probably reach. A row of that length is preferred, so that the
                sequence need not move later.

        Returns:
            `None` if there is no room now.
        """
        pools = dict.fromkeys(self._pool_for(length) for length in (max(len(tokens), expected), len(tokens)))
        slots = (self._acquire(uid, tokens, match, pool) for pool in pools)
        return next((slot for slot in slots if slot is not None), None)

    def _acquire(self, uid: int, tokens: npt.NDArray[np.int32], match: PrefixMatch, pool: Pool) -> Slot | None:
        source = match.slot
        reusable = min(match.length, len(tokens) - 1)  # the last token is computed for its logits
        fits = source is not None and not source.busy and source.pool.capacity >= len(tokens)
        slot: Slot | None
        if source is not None and fits and match.in_place:  # the next turn of a conversation: nothing is copied
            slot = source
        else:
            slot = self._take_row(pool, uid, keep=source)
            if slot is not None and source is not None and reusable >= MIN_SHARED_PREFIX:
                slot.pool.copy_prefix(source, slot.row, reusable)
            elif slot is not None:
                reusable = 0
            elif fits:  # there is nothing else to evict: reuse the source itself
                slot = source
            else:
                slot, reusable = self._take_row(pool, uid, keep=None), 0
        if slot is not None:
            slot.pool.start(slot.row, tokens, reusable)
        return slot

    def grow(self, slot: Slot, length: int) -> bool:
        """Make room for `length` tokens in a busy slot, which may move it. Return false if there is no room now."""
        old = slot.pool
        if length <= old.capacity:
            return True
        moved = self._take_row(self._pool_for(length), slot.uid, keep=slot)
        if moved is None:
            return False
        pool, row = moved.pool, moved.row
        computed, known = slot.num_computed, int(old.num_known[slot.row])
        pool.copy_prefix(slot, row, computed)
        tokens = old.tokens[slot.row, :known]
        old.clear(slot.row)
        pool.put(slot, row)
        pool.start(row, tokens, computed)
        return True

    def release(self, slot: Slot) -> None:
        """Make the slot of an ended request idle. Later requests may reuse its content."""
        slot.pool.busy[slot.row] = False
        slot.pool.num_known[slot.row] = slot.num_computed
        self._clock += 1
        slot.pool.last_used[slot.row] = self._clock

    def discard(self, slot: Slot, *, wipe: bool = False) -> None:
        """Free a slot's row. `wipe` overwrites it with 0, since a NaN would reach later sequences despite masks."""
        pool = slot.pool
        if wipe:
            for tensor in (*pool.keys, *pool.values):
                tensor[slot.row].zero_()
        pool.clear(slot.row)

    def forget(self, uid: int) -> None:
        """Free all idle slots of an unloaded adapter."""
        for pool in self.pools:
            for row in np.flatnonzero((pool.uids == uid) & ~pool.busy):
                pool.clear(int(row))

    def stats(self) -> dict[str, float]:
        num_slots = sum(int((pool.uids >= 0).sum()) for pool in self.pools)
        num_busy = sum(int(pool.busy.sum()) for pool in self.pools)
        return {
            "kv_tokens_allocated": float(self._allocated()),
            "kv_tokens_budget": float(self.budget),
            "slots_busy": float(num_busy),
            "slots_idle": float(num_slots - num_busy),
        }

    def match(self, uid: int, tokens: npt.NDArray[np.int32]) -> PrefixMatch:
        """Find the longest prefix of `tokens` that a slot of adapter `uid` holds."""
        best = PrefixMatch()
        for pool in self.pools:
            rows = np.flatnonzero(pool.uids == uid)
            if not len(rows):
                continue
            known = pool.common_prefixes(rows, tokens)
            in_cache = pool.num_computed[rows]
            computed = np.minimum(known, in_cache)
            best.awaited = max(best.awaited, int(known.max()))
            # Continuing an idle slot in place beats copying a prefix of the same length.
            whole = ~pool.busy[rows] & (computed == in_cache) & (computed > 0)
            i = int((2 * computed + whole).argmax())
            if 2 * int(computed[i]) + int(whole[i]) > 2 * best.length + int(best.in_place):
                best.slot, best.length, best.in_place = pool.slots[rows[i]], int(computed[i]), bool(whole[i])
        return best

    def _pool_for(self, length: int) -> Pool:
        return next(pool for pool in self.pools if pool.capacity >= length)

    def _allocated(self) -> int:
        return sum(pool.num_rows * pool.capacity for pool in self.pools)

    def _take_row(self, pool: Pool, uid: int, keep: Slot | None) -> Slot | None:
        """A slot on a free row: an unused row, a new one, an idle one of this pool, or memory of idle rows elsewhere.

        `keep` is not evicted, because the caller copies from it next.
        """
        crowded = sum(p.num_rows for p in self.pools) >= self._max_rows
        if None not in pool.slots and (crowded or not self._extend(pool)):
            if idle := self._idle_rows(pool, keep):
                pool.clear(idle[0])
            elif not (self._extend(pool) or self._reclaim(pool, keep)):
                return None
        slot = Slot(pool=pool, row=pool.slots.index(None), uid=uid)
        pool.put(slot, slot.row)
        return slot

    def _extend(self, pool: Pool) -> bool:
        """Add rows to a full pool: double it within `MAX_GROWTH_TOKENS` and the budget. False if there is no room."""
        room = (self.budget - self._allocated()) // pool.capacity
        doubled = max(FIRST_ROWS if pool is self.pools[0] else 1, pool.num_rows)
        num_new = min(room, doubled, max(1, MAX_GROWTH_TOKENS // pool.capacity))
        if num_new < 1:
            return False
        pool.resize(list(range(pool.num_rows)), pool.num_rows + num_new)
        return True

    @staticmethod
    def _idle_rows(pool: Pool, keep: Slot | None) -> list[int]:
        """Idle rows except `keep`, least recently used first."""
        idle = (pool.uids >= 0) & ~pool.busy
        if keep is not None and keep.pool is pool:
            idle[keep.row] = False
        rows = np.flatnonzero(idle)
        return [int(row) for row in rows[np.argsort(pool.last_used[rows])]]

    def _reclaim(self, pool: Pool, keep: Slot | None) -> bool:
        """Take free and idle rows from other pools until one more row fits into `pool`. False if that is not enough."""
        others = [p for p in self.pools if p is not pool]
        missing = pool.capacity - (self.budget - self._allocated())
        victims = [(int(p.last_used[row]), i, row) for i, p in enumerate(others) for row in self._idle_rows(p, keep)]
        free = sum(p.capacity * p.slots.count(None) for p in others)
        if free + sum(others[i].capacity for _, i, _ in victims) < missing:
            return False
        for _, i, row in sorted(victims):
            if free >= missing:
                break
            others[i].clear(row)
            free += others[i].capacity
        for other in others:
            used = [row for row, slot in enumerate(other.slots) if slot is not None]
            if len(used) < other.num_rows:
                other.resize(used, len(used))
        return self._extend(pool)
