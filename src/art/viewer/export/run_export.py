"""The answers about one run, in the files that the exported page loads when it needs them.

data/P/N/run.js                 the run, its curves, checkpoints, comparisons, costs
data/P/N/steps.js               numbers of steps
data/P/N/rows.js                the table of the exported rollouts
data/P/N/<split>-<step>.js      rollouts and groups of a step
data/P/N/<split>-<step>-tokens.js
data/P/N/tree-<step>.js         the prefix tree of a step
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from art.errors import ArtError
from art.viewer.answers.base import Answer
from art.viewer.answers.checkpoint_list import CompareQuery
from art.viewer.answers.curves import SeriesQuery
from art.viewer.answers.rollout_rows import RolloutKey, RolloutQuery, RolloutRow
from art.viewer.answers.run_list import RunDetail, SplitSteps
from art.viewer.answers.tokens import TokensQuery
from art.viewer.answers.tree import TreeQuery
from art.viewer.export.options import MAX_STEP_DETAILS, ExportOptions, choose_steps, spread
from art.viewer.viewer import Viewer

SERIES_PER_QUERY = 64
MAX_COMPARED = 6
"""Steps of a split that are compared with each other."""
MAX_PATHS = 8
MAX_TREE_NODES = 1500
PAGE = 1000

Write = Callable[[str, dict[str, Any]], int]
"""Writes a file of answers, and returns its size."""


@dataclass(slots=True)
class Counts:
    """What an export has, and what it lacks."""

    num_rollouts: int = 0
    num_all_rollouts: int = 0
    num_steps: int = 0
    num_all_steps: int = 0
    num_tokens: int = 0
    """Rollouts with exact tokens."""
    num_bytes: int = 0
    """Size of the files of rollouts."""
    problems: list[str] = field(default_factory=list)
    """What could not be read."""


class RunExport:
    """Exports one run of a viewer."""

    def __init__(self, viewer: Viewer, run: tuple[str, str], options: ExportOptions, write: Write) -> None:
        self._viewer = viewer
        self._run = run
        self._options = options
        self._write = write
        self._base = "/".join(("runs", *run))
        self._rows: list[dict[str, Any]] = []

    def export(self, counts: Counts) -> None:
        """Write the files of the run. The newest steps come first, until `max_bytes` are written."""
        detail = self._viewer.run(*self._run)
        places = [(split.split, step) for split in detail.splits for step in choose_steps(_steps(split), self._options)]
        counts.num_all_rollouts += detail.num_rollouts
        counts.num_all_steps += sum(len(_steps(split)) for split in detail.splits)
        written: dict[str, list[int]] = {}
        for split, step in sorted(places, key=lambda place: -place[1]):
            if counts.num_bytes >= self._options.max_bytes:
                break
            counts.num_bytes += self._export_step(split, step, counts)
            written.setdefault(split, []).append(step)
        for step in sorted({step for steps in written.values() for step in steps}):
            self._export_tree(step, counts)
        counts.num_steps += sum(map(len, written.values()))
        detail.splits = [SplitSteps(split=split, steps=_ranges(sorted(steps))) for split, steps in written.items()]
        self._write_file("rows.js", {f"{self._base}/rollouts": self._rows})
        self._write_file("steps.js", dict(self._step_answers(detail)))
        self._write_file("run.js", dict(self._run_answers(detail)))

    def _write_file(self, name: str, answers: dict[str, Any]) -> int:
        return self._write("/".join(("data", *self._run, name)), answers)

    def _run_answers(self, detail: RunDetail) -> Iterator[tuple[str, Any]]:
        viewer, run = self._viewer, self._run
        yield self._base, _plain(detail)
        names = [metric.name for metric in detail.metrics]
        series = []
        for start in range(0, len(names), SERIES_PER_QUERY):
            query = SeriesQuery(metric=names[start : start + SERIES_PER_QUERY])
            series += [_plain(one) for one in viewer.series(*run, query).series]
        yield f"{self._base}/series", series
        yield f"{self._base}/checkpoints", _plain(viewer.checkpoints(*run))
        yield f"{self._base}/costs", _plain(viewer.costs(*run))
        yield f"{self._base}/ledger", _plain(viewer.ledger(*run))
        first = detail.headline
        for split in detail.splits:
            steps = spread(_steps(split), MAX_COMPARED)
            pairs = {(a, b) for a in steps for b in steps if a != b}
            if first is not None and first.split == split.split and first.a != first.b:
                pairs.add((first.a, first.b))  # the comparison that the page begins with
            for a, b in sorted(pairs):
                comparison = viewer.compare(*run, CompareQuery(a=a, b=b, split=split.split, limit=PAGE))
                yield f"{self._base}/checkpoints/compare?{split.split}&{a}&{b}", _plain(comparison)

    def _step_answers(self, detail: RunDetail) -> Iterator[tuple[str, Any]]:
        main = [detail.main_metric] if detail.main_metric else [metric.name for metric in detail.metrics[:1]]
        series = self._viewer.series(*self._run, SeriesQuery(metric=main, max_points=5000)).series
        logged = {step for split in detail.splits for step in _steps(split)}
        steps = logged | {step for one in series for step in one.steps}
        for step in spread(sorted(steps), MAX_STEP_DETAILS):
            try:
                yield f"{self._base}/steps/{step}", _plain(self._viewer.step(*self._run, step))
            except ArtError:  # a point of a curve that joins several steps, and has no step of its own
                continue

    def _export_step(self, split: str, step: int, counts: Counts) -> int:
        """Export whole groups of a split and step, up to the number of rollouts that the options say."""
        answers: dict[str, Any] = {}
        tokens: dict[str, Any] = {}
        groups: set[int] = set()
        num_rollouts = 0
        for row in self._rows_of(split, step):
            if row.group not in groups and num_rollouts >= self._options.num_rollouts:
                break
            key = RolloutKey(split=split, step=step, group=row.group, index=row.index)
            place = f"{split}/{step}/{row.group}"
            try:
                answers[f"{self._base}/rollouts/{place}/{row.index}"] = _plain(self._viewer.rollout(*self._run, key))
                if row.group not in groups:
                    group = _plain(self._viewer.group(*self._run, split, step, row.group))
                    group["rollouts"] = [rollout["index"] for rollout in group["rollouts"]]
                    answers[f"{self._base}/groups/{place}"] = group
                if num_rollouts < self._options.num_tokens:
                    tokens |= dict(self._token_answers(key))
                    counts.num_tokens += 1
            except ArtError as error:
                counts.problems.append(f"{'/'.join(self._run)} {place}/{row.index}: {error}")
                continue
            groups.add(row.group)
            num_rollouts += 1
            self._rows.append(_plain(row))
        counts.num_rollouts += num_rollouts
        size = self._write_file(f"{split}-{step}.js", answers)
        return size + (self._write_file(f"{split}-{step}-tokens.js", tokens) if tokens else 0)

    def _rows_of(self, split: str, step: int) -> list[RolloutRow]:
        rows: list[RolloutRow] = []
        while True:
            query = RolloutQuery(split=split, step=step, offset=len(rows), limit=PAGE)
            page = self._viewer.rollouts(*self._run, query)
            rows += page.rows
            if not page.rows or len(rows) >= page.total:
                return sorted(rows, key=lambda row: (row.group, row.index))

    def _token_answers(self, key: RolloutKey) -> Iterator[tuple[str, Any]]:
        base = f"{self._base}/rollouts/{key.split}/{key.step}/{key.group}/{key.index}/tokens"
        first = self._viewer.tokens(*self._run, key, TokensQuery())
        yield f"{base}?0", _plain(first)
        for path in first.paths[1:MAX_PATHS]:
            yield f"{base}?{path.path}", _plain(self._viewer.tokens(*self._run, key, TokensQuery(path=path.path)))

    def _export_tree(self, step: int, counts: Counts) -> None:
        try:
            tree = self._viewer.tree(*self._run, step, TreeQuery(limit=MAX_TREE_NODES))
        except ArtError:  # the split was not trained, or its file has been removed
            return
        counts.num_bytes += self._write_file(f"tree-{step}.js", {f"{self._base}/steps/{step}/tree": _plain(tree)})


def comparison_answers(viewer: Viewer) -> dict[str, Any]:
    """Return the answers about comparisons of models, by path."""
    listed = viewer.comparisons()
    answers = {f"comparisons/{one.id}": _plain(viewer.comparison(one.id)) for one in listed.comparisons}
    return {"comparisons": _plain(listed), **answers}


def _plain(answer: Answer) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(answer.model_dump_json())  # numbers that JSON lacks are null
    return plain


def _steps(split: SplitSteps) -> list[int]:
    return [step for first, last in split.steps for step in range(first, last + 1)]


def _ranges(steps: list[int]) -> list[tuple[int, int]]:
    """Join neighbouring steps: `_ranges([1, 2, 5])` is `[(1, 2), (5, 5)]`."""
    ranges: list[tuple[int, int]] = []
    for step in steps:
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    return ranges
