"""A tracker in memory, and its sink. It can fail, be slow, hold calls, and refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from art.sinks import LoggedGroups, Refused, Row, Run, Sink


class FakeTracker:
    """Keeps what sinks send. Pass `sink` in `report_metrics`; several sinks may be made, e.g. by a resumed run."""

    def __init__(self, name: str = "fake", *, counts_rows: bool = False) -> None:
        self.name = name
        self.counts_rows = counts_rows
        self.rows: list[Row] = []
        self.groups: list[LoggedGroups] = []
        self.runs: list[Run] = []
        self.configs: list[dict[str, Any]] = []
        self.starting: Callable[[], None] = lambda: None
        """Called while a sink starts."""
        self.num_closed = 0
        self.threads: set[str] = set()
        self.start_error: Exception | None = None
        self.error: Exception | None = None
        """Raised by each call while it is set."""
        self.refuses: Callable[[Row], bool] = lambda row: False
        self.delay_s = 0.0
        self.answers = threading.Event()
        """Calls wait while it is cleared."""
        self.answers.set()
        self.num_calls = 0

    def __deepcopy__(self, memo: object) -> FakeTracker:
        return self

    def sink(self) -> Sink:
        return _FakeSink(self)

    def numbers(self) -> list[int]:
        return [row.number for row in self.rows]

    def points(self, metric: str) -> list[tuple[int, float]]:
        """What a user sees as the curve of a metric: step and value."""
        return [(row.step, row.metrics[metric]) for row in self.rows if metric in row.metrics]

    def wait_for(self, num_rows: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.rows) < num_rows:
            assert time.monotonic() < deadline, f"{self.name} has {len(self.rows)} rows, expected {num_rows}"
            time.sleep(0.005)

    def wait_for_calls(self, num_calls: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.num_calls < num_calls:
            assert time.monotonic() < deadline, f"{self.name} was called {self.num_calls} times, expected {num_calls}"
            time.sleep(0.005)


class _FakeSink(Sink):
    name = "fake"
    takes_groups = True

    def __init__(self, tracker: FakeTracker) -> None:
        self.tracker = tracker
        self.name = tracker.name  # type: ignore[misc]

    def start(self, run: Run) -> int | None:
        self.tracker.runs.append(run)
        self.tracker.starting()
        if self.tracker.start_error is not None:
            raise self.tracker.start_error
        return len(self.tracker.rows) if self.tracker.counts_rows else None

    def configure(self, config: Mapping[str, Any]) -> None:
        self.tracker.configs.append(dict(config))

    def metrics(self, row: Row) -> None:
        self._call()
        if self.tracker.refuses(row):
            raise Refused("no such number")
        self.tracker.rows.append(row)

    def groups(self, groups: LoggedGroups) -> None:
        self._call()
        self.tracker.groups.append(groups)

    def close(self, timeout_s: float) -> None:
        self.tracker.num_closed += 1

    def _call(self) -> None:
        self.tracker.num_calls += 1
        self.tracker.threads.add(threading.current_thread().name)
        self.tracker.answers.wait()
        time.sleep(self.tracker.delay_s)
        if self.tracker.error is not None:
            raise self.tracker.error
