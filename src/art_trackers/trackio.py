"""Trackio: metrics over the training step.

Trackio writes in a thread of its own and reports no errors, so the number of its rows tells what it has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from art.sinks import Row, Run, Sink


class TrackioSink(Sink):
    """Reports to the database in `TRACKIO_DIR`, or to `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL`."""

    name = "trackio"
    package, extra = "trackio", "trackio"

    def __init__(self) -> None:
        self._run: Any = None
        self._is_local = not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"))
        self._num_rows = 0

    def start(self, run: Run) -> int | None:
        import trackio

        self._run = trackio.init(
            project=run.project, name=run.name, config=dict(run.config), resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        return self._count() if self._is_local else None

    def configure(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config))
        self._run._config_logged = False  # Trackio sends the config with the first row only, and has no call for it

    def metrics(self, row: Row) -> None:
        self._run.log(dict(row.metrics), step=row.step)
        self._num_rows = row.number + 1

    def close(self, timeout_s: float) -> None:
        self._run.finish()
        if self._is_local and (count := self._count()) < self._num_rows:
            raise OSError(f"it has {count} of {self._num_rows} rows; the next run of this model sends the others")

    def _count(self) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        return int(SQLiteStorage.get_log_count(self._run.project, self._run.name))
