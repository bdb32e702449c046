"""The sinks of a model: started at `register` or at the first `log`, closed by `close`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art.errors import ConfigError
from art.protocol.checkpoint_calls import LogRequest
from art.storage.jsonl import append_lines
from art.storage.layout import ModelPaths
from art.trajectory import TrajectoryGroup

if TYPE_CHECKING:
    from art.sinks.delivery import Reporting


ReportMetrics = Sequence[str | Callable[[], Any]] | None


class ModelSinks:
    """Sinks by folder of the log: a copy of a model may be renamed, and then has a log and sinks of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_folder: dict[Path, Reporting | None] = {}

    def __deepcopy__(self, memo: Any) -> ModelSinks:
        return self  # copies of a model write to the same log

    def check(self, report_metrics: ReportMetrics) -> None:
        """Check that the trackers are known and installed.

        Raises:
            ConfigError: one is not.
        """
        from art.sinks.choose import choose_sinks

        choose_sinks(report_metrics)

    async def start(
        self, paths: ModelPaths, report_metrics: ReportMetrics, config: Callable[[], dict[str, Any]]
    ) -> Reporting | None:
        """Start the sinks that feed on a log, unless they run; `None` if the model has none.

        Raises:
            Exception: a tracker cannot start.
        """
        if paths.root not in self._by_folder:
            await asyncio.to_thread(self._start, paths, report_metrics, config)
        return self._by_folder.get(paths.root)

    def is_running(self, paths: ModelPaths) -> bool:
        """Whether trackers of a log were started."""
        return self._by_folder.get(paths.root) is not None

    def _start(self, paths: ModelPaths, report_metrics: ReportMetrics, config: Callable[[], dict[str, Any]]) -> None:
        from art.sinks.choose import choose_sinks

        with self._lock:
            if paths.root in self._by_folder:
                return
            choices = choose_sinks(report_metrics)
            if choices:
                from art.sinks.delivery import start_reporting

                self._by_folder[paths.root] = start_reporting(paths, config(), choices)
            else:
                self._by_folder[paths.root] = None

    async def configure(self, paths: ModelPaths, config: Callable[[], dict[str, Any]]) -> None:
        """Tell the sinks that run what is known about the run now."""
        reporting = self._by_folder.get(paths.root)
        if reporting is not None:
            await asyncio.to_thread(reporting.configure, config())

    def check_takes_files(self, paths: ModelPaths) -> Reporting:
        """Return the running sinks of a log if one of them takes files.

        Raises:
            ConfigError: none does.
        """
        reporting = self._by_folder.get(paths.root)
        if reporting is None or not reporting.takers_of_artefacts():
            raise ConfigError(
                "no tracker of this model takes files: choose one that does, e.g. `report_metrics=['wandb']` or "
                "['mlflow']"
            )
        return reporting

    async def report_file(self, paths: ModelPaths, path: Path, facts: dict[str, Any]) -> None:
        """Add a file or folder to the log of artefacts, from which the sinks take it.

        Raises:
            ConfigError: there is no such file, or no tracker takes files.
        """
        reporting = self.check_takes_files(paths)
        await asyncio.to_thread(_append_artefact, paths.artefacts, path, facts)
        reporting.wake()

    async def close(self) -> None:
        """Deliver what is left and close the sinks."""
        if self._by_folder:
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            running = [reporting for reporting in self._by_folder.values() if reporting is not None]
            self._by_folder.clear()
            for reporting in running:
                reporting.close()


def _append_artefact(log: Path, path: Path, facts: dict[str, Any]) -> None:
    if not path.exists():
        raise ConfigError(f"there is no file {path}", param="path")
    append_lines(log, [{"path": str(path.resolve()), **facts}])


PART_BYTES = 4 * 2**20
"""Size of the groups in one request. A larger group is sent alone."""


def log_requests(split: str, step: int, row: dict[str, Any], groups: Sequence[TrajectoryGroup]) -> list[LogRequest]:
    """Make the requests that send a row of the history with its groups. Without groups there is one.

    Args:
        row: the row as it was written.
    """
    parts: list[list[dict[str, Any]]] = [[]]
    size = 0
    for group in groups:
        dumped = group.model_dump(mode="json")
        length = len(json.dumps(dumped))
        if parts[-1] and size + length > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(dumped)
        size += length
    return [LogRequest(split=split, step=step, row=row, groups=part) for part in parts]
