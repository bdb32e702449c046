"""Read and write `history.jsonl`, which has one row of numbers per `model.log` call, and running sums of its rows.

    {"val/reward": 0.5, "val/win": 0.4, "training_step": 3, "time/wall_clock_sec": 81.2, "step": 3,
     "recorded_at": "2026-01-31T10:00:00+00:00"}

A metric that was NaN or infinite is written as null. A row that its writer named, to write it only once, also has the
name as `row_id`.

For `time/step_rollouts_s`, a row also gets the sum over all rows, `time/cum/rollouts_s`. Where a row has both tokens
and seconds, it also gets their quotient over all rows: `throughput/avg_trainer_tok_per_s`. Where a row has scenarios,
it gets the number of different ones in all rows, `data/cum/num_unique_scenarios`. The sums follow from the rows of the
history. `totals.jsonl` beside it has the rest:

    {"scenarios": ["0f3a5c7e9b1d2468"]}       hashes of scenarios that were new
    {"sums": {"data/cum/games": 100}}         what was summed elsewhere, by older versions
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from art.errors import StorageError
from art.storage.atomic import storage_errors, write_file
from art.storage.jsonl import append_lines, read_lines, read_rows_from


def append_row(path: Path, metrics: Mapping[str, float], *, step: int, row_id: str | None = None) -> dict[str, Any]:
    """Append the metrics of one log call, and return the whole row.

    `time/wall_clock_sec` counts from the first row, also after restarts.
    """
    now = datetime.now(UTC)
    began = now
    for _, earlier in read_lines(path):
        if earlier and isinstance(earlier.get("recorded_at"), str):
            began = datetime.fromisoformat(earlier["recorded_at"]).astimezone(UTC)
            break
    row: dict[str, Any] = {
        key: value if type(value) in (int, float) else float(value) for key, value in metrics.items()
    }
    row["training_step"] = step
    row.setdefault("time/wall_clock_sec", round((now - began).total_seconds(), 3))
    row |= {"step": step, "recorded_at": now.isoformat()} | ({} if row_id is None else {"row_id": row_id})
    append_lines(path, [row])
    return row


def find_row(path: Path, row_id: str) -> dict[str, Any] | None:
    """Return the row with a name; `None` if there is none."""
    return next((row for _, row in read_lines(path) if row is not None and row.get("row_id") == row_id), None)


def means_by_step(path: Path, metric: str) -> tuple[dict[int, float], int]:
    """Return the mean of a metric for each step at which it has a value, and the number of unreadable lines."""
    values: dict[int, list[float]] = defaultdict(list)
    rows = [row for _, row in read_lines(path)]
    for row in filter(None, rows):
        step, value = row.get("step", row.get("training_step")), row.get(metric)
        if isinstance(step, (int, float)) and isinstance(value, (int, float)) and math.isfinite(value):
            values[int(step)].append(float(value))
    return {step: sum(items) / len(items) for step, items in values.items()}, rows.count(None)


# -- running sums --

UNIQUE_SCENARIOS = "data/cum/num_unique_scenarios"


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
        self._scenarios: set[int] = set()
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
        for who in ("trainer", "actor"):
            tokens, seconds = totals.get(f"data/cum/{who}_tokens"), totals.get(f"time/cum/{who}_s", 0.0)
            if tokens is not None and seconds > 0:
                totals[f"throughput/avg_{who}_tok_per_s"] = tokens / seconds
        if scenarios := set(scenarios):
            self._count(scenarios)
            totals[UNIQUE_SCENARIOS] = len(self._scenarios)
        return totals

    def has_row(self, row_id: str) -> bool:
        """Whether the history has a row with this name."""
        with self.lock:
            self._read()
            return row_id in self._row_ids

    def _count(self, scenarios: Iterable[int]) -> None:
        if new := set(scenarios) - self._scenarios:
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
        self._scenarios.update(int(text, 16) for row in rows for text in row.get("scenarios", ()))


def hash_scenario(scenario_id: object) -> int:
    """Return a hash of 64 bits of the id of a scenario. The number 3 and the text "3" are the same scenario."""
    text = str(scenario_id).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _summed(row: Mapping[str, object]) -> dict[str, str]:
    """Map the names of sums to the metrics of a row that they sum, e.g. `data/cum/games` to `data/step_games`."""
    return {
        f"{section}/cum/{key.removeprefix(f'{section}/step_')}": key
        for section in ("data", "time", "throughput")
        for key, value in row.items()
        if key.startswith(f"{section}/step_") and key.count("/") == 1 and not key.endswith("_share")
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


# -- state.json, in which a script stores values between runs, e.g. its place in a data set --


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the saved state; `None` if none was saved yet. Raises `StorageError` if the file is not a JSON object."""
    with storage_errors(path, "reading"):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
    try:
        state = json.loads(text)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}")
    except ValueError as error:
        raise StorageError(f"{path} must be a JSON object ({error}); repair or delete it") from error
    return state


def overwrite_state(path: Path, state: dict[str, Any]) -> None:
    """Replace the saved state. Raises `StorageError` if writing failed, or a value has no JSON form. The old state is
    kept."""
    try:
        text = json.dumps(state, indent=2, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise StorageError(f"this state cannot be written as JSON: {error}") from error
    with storage_errors(path, "writing"):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.encode())


def merge_state(path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Merge `changes` into the saved state, nested dicts key by key. Returns the new state."""

    def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        both = {key: merge(old[key], new[key]) for key in old.keys() & new.keys()
                if isinstance(old[key], dict) and isinstance(new[key], dict)}  # fmt: skip
        return {**old, **new, **both}

    merged = merge(read_state(path) or {}, changes)
    overwrite_state(path, merged)
    return merged
