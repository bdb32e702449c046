"""Add running sums to the rows of a history: for `time/step_rollouts_s`, a row also gets `time/cum/rollouts_s`.

Where a row has both tokens and seconds, it also gets their quotient over all rows: `throughput/avg_trainer_tok_per_s`.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art.storage.jsonl import read_rows_from

_SECTIONS = ("data", "time", "throughput")


class Totals:
    """Keeps running sums of one `history.jsonl`, over restarts too. Hold `lock` from `of` until the row is written."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self._path = path
        self._offset = 0
        self._sums: defaultdict[str, float] = defaultdict(float)

    def __deepcopy__(self, memo: Any) -> Totals:
        return self  # copies of a model add to the same file

    def of(self, row: Mapping[str, float]) -> dict[str, float]:
        """Return the sums for a new row, its own numbers included, and mean speeds.

        Metrics that end in `_share` are not summed.
        """
        rows, self._offset = read_rows_from(self._path, self._offset)
        for earlier in rows:
            for name, key in _summed(earlier).items():
                self._sums[name] += earlier[key]
        totals = {name: self._sums[name] + row[key] for name, key in _summed(row).items()}
        return totals | _speeds(totals)


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
