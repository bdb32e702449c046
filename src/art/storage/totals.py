"""Add running sums to the rows of a history: for `time/step_rollouts_s`, a row also gets `time/cum/rollouts_s`.

Where a row has both tokens and seconds, it also gets their quotient over all rows: `throughput/avg_trainer_tok_per_s`.
Where a row has scenarios, it gets the number of different ones in all rows, `data/cum/num_unique_scenarios`.

The sums follow from the rows of the history. `totals.jsonl` beside it has the rest:

    {"scenarios": ["0f3a5c7e9b1d2468"]}       hashes of scenarios that were new
    {"sums": {"data/cum/games": 100}}         what was summed elsewhere, see `Totals.load_state`
"""

from __future__ import annotations

import hashlib
import math
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art.storage.jsonl import append_lines, read_rows_from

UNIQUE_SCENARIOS = "data/cum/num_unique_scenarios"
MAX_SCENARIOS = 2**16
"""Number of scenarios that are counted exactly. Their hashes take 5 MB of memory and 1.3 MB on disk.

After 200,000 scenarios the file has 2.8 MB.
"""
_SECTIONS = ("data", "time", "throughput")


@dataclass
class Pending:
    """What waits for the next row of the history."""

    metrics: dict[str, float] = field(default_factory=dict)
    scenarios: set[int] = field(default_factory=set)
    """Scenarios of the row, by `hash_scenario`."""


class Totals:
    """Keeps running sums of one `history.jsonl`, over restarts too. Hold `lock` from `of` until the row is written."""

    def __init__(self, history: Path, path: Path) -> None:
        """
        Args:
            path: the file of what does not follow from the history.
        """
        self.lock = threading.Lock()
        self._history, self._path = history, path
        self._offsets = [0, 0]
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._scenarios = ScenarioCount()
        self._row_ids: set[str] = set()

    def __deepcopy__(self, memo: Any) -> Totals:
        return self  # copies of a model add to the same file

    def of(self, row: Mapping[str, float], scenarios: Iterable[int] = ()) -> dict[str, float]:
        """Return the sums for a new row, its own numbers included, mean speeds, and the number of unique scenarios.

        Metrics that end in `_share` are not summed.

        Args:
            scenarios: those of the row, by `hash_scenario`.
        """
        self._read()
        totals = {name: self._sums[name] + row[key] for name, key in _summed(row).items()}
        totals |= _speeds(totals)
        if scenarios := set(scenarios):
            self._count(scenarios)
            totals[UNIQUE_SCENARIOS] = self._scenarios.count()
        return totals

    def has_row(self, row_id: str) -> bool:
        """Whether the history has a row with this name."""
        with self.lock:
            self._read()
            return row_id in self._row_ids

    def state(self) -> tuple[dict[str, float], list[int]]:
        """Return the sums, and the hashes of scenarios that are kept."""
        with self.lock:
            self._read()
            return dict(self._sums), self._scenarios.kept.copy()

    def load_state(self, sums: Mapping[str, float], scenarios: Iterable[int]) -> None:
        """Raise the sums to at least `sums`, and count `scenarios` too; both are kept in the file."""
        with self.lock:
            self._read()
            lacking = {name: value - self._sums.get(name, 0.0) for name, value in sums.items()}
            if lacking := {name: value for name, value in lacking.items() if value > 0}:
                append_lines(self._path, [{"sums": lacking}])
            self._count(set(scenarios))
            self._read()

    def _count(self, scenarios: Iterable[int]) -> None:
        if new := self._scenarios.missing(scenarios):
            append_lines(self._path, [{"scenarios": [f"{number:016x}" for number in new]}])
            self._read()

    def _read(self) -> None:
        """Read the lines that this or another process appended since the last read."""
        rows, self._offsets[0] = read_rows_from(self._history, self._offsets[0])
        for earlier in rows:
            if isinstance(row_id := earlier.get("row_id"), str):
                self._row_ids.add(row_id)
            for name, key in _summed(earlier).items():
                self._sums[name] += earlier[key]
        rows, self._offsets[1] = read_rows_from(self._path, self._offsets[1])
        for row in rows:
            for name, value in row.get("sums", {}).items():
                self._sums[name] += value
        self._scenarios.add(int(text, 16) for row in rows for text in row.get("scenarios", ()))


class ScenarioCount:
    """Counts different scenarios in bounded memory: exactly up to `limit`, then as an estimate that never falls.

    It keeps the `limit` smallest hashes. Hashes are uniform in [0, 2^64), so the largest h of k kept ones tells how
    many there are: (k - 1) 2^64 / h, with a standard error of 1 / sqrt(k), 0.4 % by default (Bar-Yossef et al.,
    "Counting distinct elements in a data stream", RANDOM 2002).
    """

    def __init__(self, limit: int = MAX_SCENARIOS) -> None:
        self._limit = limit
        self.kept: list[int] = []

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Return those of different `numbers` that `add` would keep."""
        places = ((bisect_left(self.kept, number), number) for number in numbers)
        return [number for place, number in places if place < self._limit and self.kept[place : place + 1] != [number]]

    def add(self, numbers: Iterable[int]) -> None:
        if new := self.missing(set(numbers)):
            self.kept = sorted(self.kept + new)[: self._limit]

    def count(self) -> int:
        known = len(self.kept)
        return known if known < self._limit else max(known, (known - 1) * 2**64 // self.kept[-1])


def hash_scenario(scenario_id: object) -> int:
    """Return a hash of 64 bits of the id of a scenario. The number 3 and the text "3" are the same scenario."""
    text = str(scenario_id).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _speeds(totals: Mapping[str, float]) -> dict[str, float]:
    """Return tokens per second over all rows, for the sums that a row has."""
    return {
        f"throughput/avg_{who}_tok_per_s": totals[f"data/cum/{who}_tokens"] / totals[f"time/cum/{who}_s"]
        for who in ("trainer", "actor")
        if f"data/cum/{who}_tokens" in totals and totals.get(f"time/cum/{who}_s", 0.0) > 0
    }


def _summed(row: Mapping[str, object]) -> dict[str, str]:
    """Map the names of sums to the metrics of a row that they sum, e.g. `data/cum/games` to `data/step_games`."""
    return {
        f"{section}/cum/{key.removeprefix(f'{section}/step_')}": key
        for section in _SECTIONS
        for key, value in row.items()
        if key.startswith(f"{section}/step_") and key.count("/") == 1 and not key.endswith("_share")
        if isinstance(value, (int, float)) and math.isfinite(value)
    }
