"""TensorBoard: event files with one event per row: its scalars at the training step.

The number of events tells how many rows the files have, so a killed run continues with exactly the next one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art.sinks import Row, Run, Sink

_ROWS, _CONFIG = ".rows", ".config"
"""Ends of the names of event files: with rows, and with the run's config."""


class TensorboardSink(Sink):
    """Writes below `TENSORBOARD_LOGGING_DIR` as `<project>/<name>`, else to `sinks/tensorboard` in the model's log."""

    name = "tensorboard"
    package, extra = "tensorboard", "tensorboard"

    def __init__(self, folder: Path | str | None = None) -> None:
        """
        Args:
            folder: folder of the event files.
        """
        self._folder = None if folder is None else Path(folder)
        self._writer: Any = None
        self._config: Any = None

    def start(self, run: Run) -> int | None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        root = os.environ.get("TENSORBOARD_LOGGING_DIR")
        folder = self._folder or (Path(root, run.project, run.name) if root else run.folder / "tensorboard")
        folder.mkdir(parents=True, exist_ok=True)
        num_rows = count_rows(folder)
        self._config = EventFileWriter(str(folder), filename_suffix=_CONFIG)
        self.configure(run.config)
        self._writer = EventFileWriter(str(folder), filename_suffix=_ROWS)
        return num_rows

    def configure(self, config: Mapping[str, Any]) -> None:
        text = json.dumps(dict(config), indent=2, ensure_ascii=False)
        self._config.add_event(_event(time.time(), 0, [_text("config", text)]))
        self._config.flush()

    def metrics(self, row: Row) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
        self._writer.add_event(_event(row.recorded_at.timestamp(), row.step, values))
        self._writer.flush()

    def close(self, timeout_s: float) -> None:
        self._config.close()
        self._writer.close()


def count_rows(folder: Path) -> int:
    """Return the number of complete events with a row in the folder's event files."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    events = (
        Event.FromString(data) for path in folder.glob(f"*{_ROWS}") for data in RawEventFileLoader(str(path)).Load()
    )
    return sum(event.HasField("summary") for event in events)


def _event(wall_time: float, step: int, values: list[Any]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(wall_time=wall_time, step=step, summary=Summary(value=values))


def _text(tag: str, text: str) -> Any:
    """Make a value for TensorBoard's page of texts. It shows Markdown; indented lines are shown as they are."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    strings = ["\n".join(f"    {line}" for line in text.splitlines()).encode()]
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(
        tag=tag, metadata=metadata, tensor=TensorProto(dtype=DT_STRING, string_val=strings, tensor_shape=shape)
    )
