"""The checkpoints of a run on the disk, and what changed from one step to another on the same scenarios."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import orjson

from art.errors import ArtError
from art.protocol.organisation.promotions import PromotionRecord, Verdict
from art.report.scores import Estimate, estimate, estimate_change, mean_with_interval
from art.storage import checkpoints
from art.viewer import conversation as talk
from art.viewer.conversation import Row
from art.viewer.conversation import number as as_number
from art.viewer.index.files import read_line
from art.viewer.rollout_answers import Interval, RolloutKey
from art.viewer.rollouts import member
from art.viewer.run_answers import (
    MOST_PROMOTIONS,
    CheckpointList,
    CheckpointRow,
    CompareQuery,
    Comparison,
    ScenarioChange,
    StepChange,
)
from art.viewer.run_files import RunFiles

_Side = dict[int, list[tuple[float, RolloutKey]]]
"""Values of the rollouts of a step by the number of their scenario."""

BEST_METRIC = "val/reward"
"""Metric by which the server keeps the best checkpoint, unless a request says another one."""
_MOST_KEYS = 8


def list_checkpoints(run: RunFiles, number: int) -> CheckpointList:
    """List the complete checkpoints of a run, newest first.

    Args:
        number: number of the run in the index.
    """
    steps = checkpoints.list_steps(run.paths.checkpoints)
    with run.refreshed():
        logged: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for name in run.metric_names():
            points = run.points(name)
            for place in np.flatnonzero(np.isin(points.steps, steps)):
                logged[int(points.steps[place])][name] = float(points.means[place])
        origins = list(dict.fromkeys(run.jobs.origins))
    for step, metrics in _reported(run).items():
        logged[step] |= metrics
    served, promoted = _recorded_step(run, "models"), _recorded_step(run, "promoted")
    newest = served if served in steps else max(steps, default=None)
    scores = {step: logged[step][BEST_METRIC] for step in steps if BEST_METRIC in logged.get(step, {})}
    best = max(scores, key=lambda step: (scores[step], step), default=None)
    rows = [
        CheckpointRow(
            step=step,
            created_at=_created_at(run, step),
            size_bytes=_size(run, step),
            is_newest=step == newest,
            is_best=step == best,
            is_promoted=step == promoted,
            metrics=logged.get(step, {}),
            parents=origins if step == steps[0] else [],
        )
        for step in reversed(steps)
    ]
    promotions, num_promotions = _promotions(run)
    return CheckpointList(
        checkpoints=rows, best_metric=BEST_METRIC, compared=measure_change(run, number), promotions=promotions,
        num_promotions=num_promotions,
    )  # fmt: skip


def compare_steps(run: RunFiles, number: int, query: CompareQuery) -> Comparison:
    """Compare a metric of two steps scenario by scenario.

    Args:
        number: number of the run in the index.
    """
    metric, sides, names = _sides(run, number, query)
    before, after = sides
    changes = [_change(names[key], before[key], after[key]) for key in before if key in after]
    changes.sort(key=lambda change: (-abs(change.difference), change.scenario))
    return Comparison(
        metric=metric,
        a=query.a,
        b=query.b,
        split=query.split,
        before=_mean(before),
        after=_mean(after),
        num_scenarios=len(changes),
        difference=_interval(estimate_change(*map(_scored, sides))) if changes else None,
        scenarios=changes[query.offset : query.offset + query.limit],
        num_better=sum(change.difference > 0 for change in changes),
        num_worse=sum(change.difference < 0 for change in changes),
        splits=_common_splits(run, number, query),
        missing=_missing(query, before, after),
    )


def measure_change(run: RunFiles, number: int) -> StepChange | None:
    """Measure the run's headline metric at the first and the last step that share held-out scenarios.

    Where no steps share any it is measured at the last held-out step; `None` without held-out rollouts.
    """
    scenarios: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    rows = run.indexer.store.read(
        "SELECT DISTINCT split, step, scenario_key FROM rollouts WHERE file IN "
        "(SELECT id FROM files WHERE run = ? AND split <> 'train') AND reward IS NOT NULL",
        (number,),
    )
    for split, step, key in rows:
        scenarios[split][step].add(key)
    places = []
    for split, steps in scenarios.items():
        last = max(steps)
        first = min(step for step in steps if steps[step] & steps[last])
        places.append((first != last, split == "val", split, first, last))
    if not places:
        return None
    _, _, split, first, last = max(places)
    change = compare_steps(run, number, CompareQuery(a=first, b=last, split=split, limit=1))
    return StepChange(**{name: getattr(change, name) for name in StepChange.model_fields})


def _sides(run: RunFiles, number: int, query: CompareQuery) -> tuple[str, list[_Side], dict[int, str | None]]:
    """Return the metric that is compared, its values at both steps by scenario, and the names of the scenarios."""
    headline = talk.mapping(run.recorded_settings().get("task")).get("headline_metric")
    for metric in (query.metric or str(headline or "reward"), "reward"):
        names: dict[int, str | None] = {}
        sides = [_values(run, number, (query.split, step), metric, names) for step in (query.a, query.b)]
        if query.metric or all(sides):
            break
    return metric, sides, names


def _values(run: RunFiles, number: int, place: tuple[str, int], metric: str, names: dict[int, str | None]) -> _Side:
    """Read the values of a metric in one file of rollouts by scenario, and note the names of the scenarios."""
    values: _Side = defaultdict(list)
    lines: dict[int, Row] = {}
    rows = run.indexer.store.read(
        "SELECT scenario_key, scenario, reward, grp, idx, place, length FROM rollouts WHERE file = "
        "(SELECT id FROM files WHERE run = ? AND split = ? AND step = ?) AND reward IS NOT NULL ORDER BY id",
        (number, *place),
    )
    for scenario, name, value, group, index, offset, length in rows:
        if metric != "reward":
            if offset not in lines:  # the index has the reward of each rollout only
                lines[offset] = talk.mapping(read_line(run.paths.trajectories(*place), offset, length))
            value = as_number(talk.mapping(member(lines[offset], index).get("metrics")).get(metric))
        if value is not None:
            names[scenario] = name
            values[scenario].append((value, RolloutKey(split=place[0], step=place[1], group=group, index=index)))
    return values


def _recorded_step(run: RunFiles, table: Literal["models", "promoted"]) -> int | None:
    """The step that the server recorded for the run in a table that has one step per model."""
    rows = run.database.read(f"SELECT step FROM {table} WHERE project = ? AND name = ?", (run.project, run.name))
    return rows[0][0] if rows else None


def _promotions(run: RunFiles) -> tuple[list[PromotionRecord], int]:
    """The newest decisions about the promoted checkpoint, newest first, and how many there are."""
    where = "FROM promotions WHERE project = ? AND name = ?"
    rows = run.database.read(
        f"SELECT number, at, step, previous_step, decision, key_id, note, verdict {where} "
        f"ORDER BY number DESC LIMIT {MOST_PROMOTIONS}",
        (run.project, run.name),
    )
    records = [
        PromotionRecord(
            number=number, at=at, step=step, previous_step=previous, decision=decision, key_id=key_id, note=note,
            verdict=None if verdict is None else Verdict.model_validate_json(verdict),
        )
        for number, at, step, previous, decision, key_id, note, verdict in rows
    ]  # fmt: skip
    counts = run.database.read(f"SELECT count(*) {where}", (run.project, run.name))
    return records, counts[0][0] if counts else 0


def _reported(run: RunFiles) -> dict[int, dict[str, float]]:
    """Means of the metrics that scripts reported to the server, by step; those of programs that keep no log too."""
    rows = run.database.read(
        "SELECT step, metrics FROM step_metrics WHERE project = ? AND name = ? AND step NOT IN "
        "(SELECT value FROM json_each(?))",
        (run.project, run.name, orjson.dumps(run.history.columns.steps().tolist()).decode()),
    )
    values: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step, text in rows:
        for name, item in orjson.loads(text).items():
            if (value := as_number(item)) is not None:
                values[step][name].append(value)
    return {step: {name: math.fsum(v) / len(v) for name, v in metrics.items()} for step, metrics in values.items()}


def _created_at(run: RunFiles, step: int) -> float | None:
    try:
        return checkpoints.created_at(run.paths.checkpoint(step))
    except ArtError:  # deleted a moment ago
        return None


def _size(run: RunFiles, step: int) -> int:
    try:
        return sum(entry.size for entry in checkpoints.list_files(run.paths.checkpoint(step)).values())
    except ArtError:
        return 0


def _change(
    name: str | None, before: Sequence[tuple[float, RolloutKey]], after: Sequence[tuple[float, RolloutKey]]
) -> ScenarioChange:
    old, new = (estimate([reward for reward, _ in side]) for side in (before, after))
    return ScenarioChange(
        scenario=name or "",
        a=_interval(old),
        b=_interval(new),
        difference=new.mean - old.mean,
        rollouts_a=[key for _, key in before[:_MOST_KEYS]],
        rollouts_b=[key for _, key in after[:_MOST_KEYS]],
    )


def _scored(side: Mapping[int, Sequence[tuple[float, RolloutKey]]]) -> list[tuple[int, float]]:
    return [(scenario, reward) for scenario, rollouts in side.items() for reward, _ in rollouts]


def _mean(side: _Side) -> Interval | None:
    """The mean over all rollouts of a step, as recipes print it."""
    values = [value for rollouts in side.values() for value, _ in rollouts]
    mean, (low, high) = mean_with_interval(values)
    return _interval(Estimate(mean=mean, low=low, high=high, count=len(values))) if values else None


def _interval(value: Estimate) -> Interval:
    is_known = math.isfinite(value.low)
    return Interval(
        mean=value.mean,
        low=value.low if is_known else None,
        high=value.high if is_known else None,
        num=value.count,
    )


def _common_splits(run: RunFiles, number: int, query: CompareQuery) -> list[str]:
    rows = run.indexer.store.read(
        "SELECT split FROM files WHERE run = ? AND step = ? "
        "INTERSECT SELECT split FROM files WHERE run = ? AND step = ?",
        (number, query.a, number, query.b),
    )
    return sorted(split for (split,) in rows)


def _missing(query: CompareQuery, before: Mapping[int, object], after: Mapping[int, object]) -> str | None:
    empty = [str(step) for step, side in ((query.a, before), (query.b, after)) if not side]
    if empty:
        return f"No rollout with a reward was logged for step {' and step '.join(empty)} in the split {query.split!r}."
    alone = len(before.keys() ^ after.keys())
    return f"Scenarios that have rollouts at one of the two steps only are left out: {alone}." if alone else None
