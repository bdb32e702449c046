"""`seconds.json`: wall time by what it was spent on, over all calls of a recipe."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from art.storage.atomic import write_file


@dataclass(slots=True)
class Clock:
    """Seconds spent on each activity, summed over all calls of a recipe in a file that each addition rewrites."""

    path: Path
    seconds: dict[str, float]

    @classmethod
    def load(cls, out: Path) -> Clock:
        path = out / "seconds.json"
        return cls(path, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})

    def add(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds
        write_file(self.path, (json.dumps(self.seconds, indent=2) + "\n").encode())

    @contextlib.contextmanager
    def measure(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - started)
