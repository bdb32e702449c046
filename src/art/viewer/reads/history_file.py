"""Follows a `history.jsonl`: its numbers by metric, and when each step was logged."""

from __future__ import annotations

from array import array
from datetime import datetime

from art.viewer.conversation import Row, whole
from art.viewer.reads.columns import Columns
from art.viewer.reads.followed_file import FollowedFile

_NOT_METRICS = ("step", "training_step", "recorded_at")


class HistoryFile(FollowedFile):
    """The logged rows of one run."""

    columns: Columns
    times: tuple[array[int], array[float]]
    """Step and Unix time of each row that has both."""

    def reset(self) -> None:
        self.columns = Columns()
        self.times = (array("q"), array("d"))

    def take(self, row: Row) -> None:
        step = whole(row.get("step", row.get("training_step")))
        if step is None:
            raise ValueError("a row of a history has a step")
        self.columns.add(step, {name: value for name, value in row.items() if name not in _NOT_METRICS})
        try:
            recorded_at = datetime.fromisoformat(row["recorded_at"]).timestamp()
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        self.times[0].append(step)
        self.times[1].append(recorded_at)
