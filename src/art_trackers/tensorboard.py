"""TensorBoard: event files with one event per row: its scalars and histograms at the training step.

The number of events tells how many rows the files have, so a killed run continues with exactly the next one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from art.sinks import Row, Run, Sink

_ROWS = ".rows"
"""End of the names of event files."""


class TensorboardSink(Sink):
    """Writes below `TENSORBOARD_LOGGING_DIR` as `<project>/<name>`, else to `sinks/tensorboard` in the model's log."""

    name = "tensorboard"
    package, extra = "tensorboard", "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, run: Run) -> int | None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        root = os.environ.get("TENSORBOARD_LOGGING_DIR")
        folder = Path(root, run.project, run.name) if root else run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        num_rows = count_rows(folder)
        self._writer = EventFileWriter(str(folder), filename_suffix=_ROWS)
        return num_rows

    def metrics(self, row: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        scalars, histograms = row.split_histograms()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        for name, histogram in histograms.items():
            low, *ends = histogram.edges
            proto = HistogramProto(
                min=low, max=ends[-1], num=sum(histogram.counts), bucket_limit=ends, bucket=histogram.counts
            )
            values.append(Summary.Value(tag=name, histo=proto))
        at = row.recorded_at.timestamp()
        self._writer.add_event(Event(wall_time=at, step=row.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, timeout_s: float) -> None:
        self._writer.close()


def count_rows(folder: Path) -> int:
    """Return the number of complete events with a row in the folder's event files."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    events = (
        Event.FromString(data) for path in folder.glob(f"*{_ROWS}") for data in RawEventFileLoader(str(path)).Load()
    )
    return sum(event.HasField("summary") for event in events)
