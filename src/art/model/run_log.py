"""The local log of a model: history, trajectories, state and costs, as files under its `base_path`."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art.costs import Ledger, close_row, context_of
from art.metrics.groups import count_groups, name_metrics, scenarios_of, summarize_groups, take_costs
from art.storage.history import Pending, Totals, append_row, find_row, hash_scenario, overwrite_state, read_state
from art.storage.layout import ModelPaths
from art.storage.trajectories import append_groups
from art.trajectory import TrajectoryGroup

_WRITING_SETTINGS = threading.Lock()


class RunLog:
    """Writes a model's history, trajectories and costs. Each call names the files: a copy of a model may be renamed."""

    def __init__(self) -> None:
        self.pending: defaultdict[str, Pending] = defaultdict(Pending)
        """What waits for the next row of the history by context: `train`, `eval`, another split, or "" for any row."""
        self._ledgers: dict[Path, Ledger] = {}
        self._totals: dict[Path, Totals] = {}
        self._has_settings: set[Path] = set()
        """Files of settings that were written."""

    def ledger(self, paths: ModelPaths, max_usd: float | None) -> Ledger:
        """Return the ledger (record) of the model's costs, with a limit in USD."""
        if paths.costs not in self._ledgers:
            self._ledgers[paths.costs] = Ledger(path=paths.costs)
        self._ledgers[paths.costs].max_usd = max_usd
        return self._ledgers[paths.costs]

    def totals(self, paths: ModelPaths) -> Totals:
        """Return the sums over the rows of the history."""
        return self._totals.setdefault(paths.history, Totals(paths.history, paths.totals))

    def has_settings(self, paths: ModelPaths) -> bool:
        """Whether `keep_settings` was called."""
        return paths.settings in self._has_settings

    def keep_settings(self, paths: ModelPaths, settings: dict[str, Any]) -> None:
        """Write down settings of the run, over sections of the same name from an earlier run."""
        with _WRITING_SETTINGS:
            overwrite_state(paths.settings, (read_state(paths.settings) or {}) | settings)
        self._has_settings.add(paths.settings)

    def take_pending(self, split: str) -> dict[str, float]:
        """Return the metrics that wait for a row of `split`, and forget them."""
        taken: dict[str, float] = {}
        for pending in self._waiting(split):
            taken |= pending.metrics
            pending.metrics.clear()
        return taken

    def _waiting(self, split: str) -> list[Pending]:
        return [self.pending[context] for context in ("", context_of(split)) if context in self.pending]

    async def append(
        self,
        paths: ModelPaths,
        ledger: Ledger,
        groups: list[TrajectoryGroup],
        metrics: Mapping[str, float],
        split: str,
        step: int,
        *,
        row_id: str | None = None,
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Append a row to the history, and groups to the file of their split and step.

        Args:
            metrics: numbers for the row; they replace those computed from `groups`. `costs/...` go to the ledger.
            row_id: name of the row. What a killed call with the same name has done already is not done again; the row
                itself comes last.

        Returns:
            The metrics of the row, and the row as it was written.
        """
        if paths.history not in self._totals:
            paths.check_spelling()
        summary, reported = take_costs(summarize_groups(groups))
        metrics, also_reported = take_costs(metrics)
        costs = await asyncio.to_thread(close_row, ledger, reported | also_reported, split, step, row_id)
        row = name_metrics(summary, split) | costs
        if groups and split == "train":
            row |= count_groups(groups)
        row |= name_metrics(metrics, split)
        if groups:
            await asyncio.to_thread(append_groups, paths.trajectories(split, step), groups, once=row_id is not None)
        trained = groups if split == "train" else []  # held-out groups do not count as seen
        scenarios = {hash_scenario(name) for group in trained for name in scenarios_of(group)}
        for pending in self._waiting(split):
            scenarios |= pending.scenarios
            pending.scenarios.clear()
        totals = self.totals(paths)

        def write() -> dict[str, Any]:
            with totals.lock:
                return append_row(paths.history, totals.of(row, scenarios) | row, step=step, row_id=row_id)

        return row, await asyncio.to_thread(write)

    async def find(self, paths: ModelPaths, row_id: str) -> tuple[dict[str, float], dict[str, Any]] | None:
        """Return the metrics and the row that `append` wrote under this name; `None` if it has written none."""
        if not await asyncio.to_thread(self.totals(paths).has_row, row_id):
            return None
        row = await asyncio.to_thread(find_row, paths.history, row_id) or {}
        return {key: value for key, value in row.items() if isinstance(value, (int, float))}, row
