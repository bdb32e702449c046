"""`Viewers`: the page about several data directories at once, as `art view DIR DIR` shows them.

Each run keeps its project and name. Where two directories have the same ones, the name gets the folder's name after it:
`seed0.run-a`, `seed0.run-b`.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from art.errors import NotFoundError
from art.storage.labels import LabelChanges, RunLabels
from art.storage.layout import DataDir
from art_page.rollout_answers import PageAnswer
from art_page.run_answers import ComparisonList, RunDetail, RunList
from art_page.seeds import find_groups
from art_page.viewer import Viewer, list_names

_Key = tuple[str, ...]
_LIST_S = 2.0
"""Seconds for which the names of runs in the directories are remembered."""


class Viewers:
    """Answers what `Viewer` answers, from several directories."""

    def __init__(self, data_dirs: Sequence[DataDir]) -> None:
        self.viewers = [Viewer(data_dir) for data_dir in data_dirs]
        self._listed_at = -_LIST_S
        self._runs: dict[_Key, tuple[Viewer, _Key]] = {}
        """Viewer, project and name of each run, by project and name as they are shown."""

    def close(self) -> None:
        for viewer in self.viewers:
            viewer.close()

    def complete(self) -> None:
        """Wait until the rollouts of all runs are indexed."""
        for viewer in self.viewers:
            viewer.complete()

    def version(self, project: str | None = None, name: str | None = None) -> str:
        """Return a text that changes when an answer about the run, or about any run without a name, can change."""
        if project and name:
            viewer, names = self._run(project, name)
            return viewer.version(*names)
        return "+".join(viewer.version(project) for viewer in self.viewers)

    def answer(self, method: str, arguments: dict[str, Any]) -> PageAnswer:
        """Return the answer of the method of `Viewer` that has this name."""
        if "name" in arguments:
            shown = arguments["name"]
            viewer, (project, name) = self._run(arguments["project"], shown)
            answer = call_viewer(viewer, method, {**arguments, "project": project, "name": name})
            return answer.model_copy(update={"name": shown}) if isinstance(answer, RunDetail) else answer
        if method == "comparison":
            viewer, (own,) = self._find(self._comparisons(), (arguments["comparison"],), "comparison")
            return viewer.comparison(own)
        if method == "comparisons":
            shown_ids = {(viewer, own): key for (key,), (viewer, (own,)) in self._comparisons().items()}
            lists = [(viewer, viewer.comparisons()) for viewer in self.viewers]
            lines = [
                line.model_copy(update={"id": shown_ids[viewer, line.id]})
                for viewer, found in lists
                for line in found.comparisons
            ]
            lines.sort(key=lambda line: -line.updated_at)
            return ComparisonList(comparisons=lines, unreadable=[one for _, found in lists for one in found.unreadable])
        return self.runs(**arguments)

    def runs(self, project: str | None = None) -> RunList:
        """List all runs, or those of one project."""
        self._listed_at = -_LIST_S
        shown = {(viewer, names): key for key, (viewer, names) in self._all_runs().items()}
        runs = [
            run.model_copy(update={"name": shown[viewer, (run.project, run.name)][1]})
            for viewer in self.viewers
            for run in viewer.runs(project).runs
            if (viewer, (run.project, run.name)) in shown
        ]
        runs.sort(key=lambda run: (-(run.updated_at or 0.0), run.project, run.name))
        return RunList(runs=runs, groups=find_groups(runs), now=time.time())

    def label(self, project: str, name: str, changes: LabelChanges) -> RunLabels:
        """Replace tags, notes, star or archive mark of a run, and return all of them."""
        viewer, (own_project, own_name) = self._run(project, name)
        return viewer.label(own_project, own_name, changes)

    def _run(self, project: str, name: str) -> tuple[Viewer, _Key]:
        return self._find(self._all_runs(), (project, name), "run")

    def _all_runs(self) -> dict[_Key, tuple[Viewer, _Key]]:
        if time.monotonic() - self._listed_at >= _LIST_S:
            self._runs = _name_all(
                (one, names) for one in self.viewers for names in list_names(one.data_dir, one.database)
            )
            self._listed_at = time.monotonic()
        return self._runs

    def _comparisons(self) -> dict[_Key, tuple[Viewer, _Key]]:
        return _name_all((one, (line.id,)) for one in self.viewers for line in one.comparisons().comparisons)

    def _find(self, places: dict[_Key, tuple[Viewer, _Key]], key: _Key, what: str) -> tuple[Viewer, _Key]:
        if key not in places:
            raise NotFoundError(f"there is no {what} {'/'.join(key)} in these data directories", param="name")
        return places[key]


def call_viewer(viewer: Viewer | Viewers, method: str, arguments: dict[str, Any]) -> PageAnswer:
    """Return the answer of the method of `Viewer` that has this name."""
    if isinstance(viewer, Viewers):
        return viewer.answer(method, arguments)
    answer: PageAnswer = getattr(viewer, method)(**arguments)
    return answer


def _name_all(found: Iterable[tuple[Viewer, _Key]]) -> dict[_Key, tuple[Viewer, _Key]]:
    """Give each thing a name of its own: the last part of its key, with the folder's name where others have it too."""
    found = list(found)
    counts = Counter(key for _, key in found)
    named: dict[_Key, tuple[Viewer, _Key]] = {}
    for viewer, key in found:
        *before, name = key
        if counts[key] > 1:
            folder = re.sub(r"[^A-Za-z0-9_-]+", "-", viewer.data_dir.root.name)[-40:]
            name = f"{name[:80]}.{folder}"
        number, shown = 2, name
        while (*before, shown) in named:  # folders of the same name
            number, shown = number + 1, f"{name}-{number}"
        named[*before, shown] = (viewer, key)
    return named
