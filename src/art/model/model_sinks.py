"""The sinks of a model: started at `register` or at the first `log`, closed by `close`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art.storage.layout import ModelPaths

if TYPE_CHECKING:
    from art.sinks.delivery.reporting import Reporting

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
        from art.sinks.delivery.choose import choose_sinks

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

    def _start(self, paths: ModelPaths, report_metrics: ReportMetrics, config: Callable[[], dict[str, Any]]) -> None:
        from art.sinks.delivery.choose import choose_sinks

        with self._lock:
            if paths.root in self._by_folder:
                return
            choices = choose_sinks(report_metrics)
            if choices:
                from art.sinks.delivery.reporting import start_reporting

                self._by_folder[paths.root] = start_reporting(paths, config(), choices)
            else:
                self._by_folder[paths.root] = None

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
