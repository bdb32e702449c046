"""The checkpoints of a run on the disk, and what changed from one step to another on the same scenarios."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict

import numpy as np
import orjson

from art.errors import ArtError
from art.metrics.scores import Estimate, estimate, estimate_change, mean_with_interval
from art.protocol.promotions import PromotionRecord, Verdict
from art.storage import checkpoints
from art_page import conversation as talk
from art_page.conversation import Row
from art_page.conversation import number as as_number
from art_page.index_files import read_line
from art_page.rollout_answers import Interval, RolloutKey
from art_page.rollouts import member
from art_page.run_answers import (
    MOST_PROMOTIONS,
    CheckpointRow,
    CompareQuery,
    RunCheckpoints,
    ScenarioChange,
    StepChange,
    StepComparison,
)
from art_page.run_files import RunFiles

_Side = dict[int, list[tuple[float, RolloutKey]]]
"""Values of the rollouts of a step by the number of their scenario."""

BEST_METRIC = "val/reward"
"""Metric by which the server keeps the best checkpoint, unless a request says another one."""
_MOST_KEYS = 8


def list_checkpoints(run: RunFiles) -> RunCheckpoints:
    """List the complete checkpoints of a run, newest first."""
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
    where, own = "WHERE project = ? AND name = ?", (run.project, run.name)
    recorded = [run.database.read(f"SELECT step FROM {table} {where}", own) for table in ("models", "promoted")]
    served, promoted = (found[0][0] if found else None for found in recorded)
    newest = served if served in steps else max(steps, default=None)
    scores = {step: logged[step][BEST_METRIC] for step in steps if BEST_METRIC in logged.get(step, {})}
    best = max(scores, key=lambda step: (scores[step], step), default=None)
    rows = []
    for step in reversed(steps):
        created_at, size = None, 0
        with contextlib.suppress(ArtError):  # deleted a moment ago
            created_at = checkpoints.created_at(run.paths.checkpoint(step))
            size = sum(entry.size for entry in checkpoints.list_files(run.paths.checkpoint(step)).values())
        row = CheckpointRow(
            step=step, created_at=created_at, size_bytes=size, is_newest=step == newest, is_best=step == best,
            is_promoted=step == promoted, metrics=logged.get(step, {}), parents=origins if step == steps[0] else [],
        )  # fmt: skip
        rows.append(row)
    columns = ("number", "at", "step", "previous_step", "decision", "key_id", "note", "verdict")
    newest_first = f"{where} ORDER BY number DESC LIMIT {MOST_PROMOTIONS}"
    decisions = run.database.read(f"SELECT {', '.join(columns)} FROM promotions {newest_first}", own)
    promotions = []
    for values in decisions:
        *_, verdict = values
        parsed = None if verdict is None else Verdict.model_validate_json(verdict)
        promotions.append(PromotionRecord(**dict(zip(columns, values, strict=True)) | {"verdict": parsed}))
    counts = run.database.read(f"SELECT count(*) FROM promotions {where}", own)
    return RunCheckpoints(
        checkpoints=rows, best_metric=BEST_METRIC, compared=measure_change(run), promotions=promotions,
        num_promotions=counts[0][0] if counts else 0,
    )  # fmt: skip


def compare_steps(run: RunFiles, query: CompareQuery) -> StepComparison:
    """Compare a metric of two steps scenario by scenario."""
    metric, sides, names = _sides(run, query)
    before, after = sides
    changes = []
    for key in filter(after.__contains__, before):
        old, new = (estimate([reward for reward, _ in side[key]]) for side in sides)
        change = ScenarioChange(
            scenario=names[key] or "", a=_interval(old), b=_interval(new), difference=new.mean - old.mean,
            rollouts_a=[at for _, at in before[key][:_MOST_KEYS]], rollouts_b=[at for _, at in after[key][:_MOST_KEYS]],
        )  # fmt: skip
        changes.append(change)
    changes.sort(key=lambda change: (-abs(change.difference), change.scenario))
    scored = [[(key, value) for key, rollouts in side.items() for value, _ in rollouts] for side in sides]
    splits = run.indexer.store.read(
        "SELECT split FROM files WHERE run = ? AND step = ? "
        "INTERSECT SELECT split FROM files WHERE run = ? AND step = ?",
        (run.number, query.a, run.number, query.b),
    )
    missing = None
    if empty := [str(step) for step, side in ((query.a, before), (query.b, after)) if not side]:
        where = " and step ".join(empty)
        missing = f"No rollout with a reward was logged for step {where} in the split {query.split!r}."
    elif alone := len(before.keys() ^ after.keys()):
        missing = f"Scenarios that have rollouts at one of the two steps only are left out: {alone}."
    return StepComparison(
        metric=metric, a=query.a, b=query.b, split=query.split, before=_mean(before), after=_mean(after),
        num_scenarios=len(changes), difference=_interval(estimate_change(*scored)) if changes else None,
        scenarios=changes[query.offset : query.offset + query.limit],
        num_better=sum(change.difference > 0 for change in changes),
        num_worse=sum(change.difference < 0 for change in changes),
        splits=sorted(split for (split,) in splits), missing=missing,
    )  # fmt: skip


def measure_change(run: RunFiles) -> StepChange | None:
    """Measure the run's headline metric at the first and the last step that share held-out scenarios.

    Where no steps share any it is measured at the last held-out step; `None` without held-out rollouts.
    """
    scenarios: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    rows = run.indexer.store.read(
        "SELECT DISTINCT split, step, scenario_key FROM rollouts WHERE file IN "
        "(SELECT id FROM files WHERE run = ? AND split <> 'train') AND reward IS NOT NULL",
        (run.number,),
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
    change = compare_steps(run, CompareQuery(a=first, b=last, split=split, limit=1))
    return StepChange(**{name: getattr(change, name) for name in StepChange.model_fields})


def _sides(run: RunFiles, query: CompareQuery) -> tuple[str, list[_Side], dict[int, str | None]]:
    """Return the metric that is compared, its values at both steps by scenario, and the names of the scenarios."""
    headline = talk.mapping(run.recorded_settings().get("task")).get("headline_metric")
    for metric in (str(headline or "reward"), "reward"):
        names: dict[int, str | None] = {}
        sides = [_values(run, (query.split, step), metric, names) for step in (query.a, query.b)]
        if all(sides):
            break
    return metric, sides, names


def _values(run: RunFiles, place: tuple[str, int], metric: str, names: dict[int, str | None]) -> _Side:
    """Read the values of a metric in one file of rollouts by scenario, and note the names of the scenarios."""
    values: _Side = defaultdict(list)
    lines: dict[int, Row] = {}
    rows = run.indexer.store.read(
        "SELECT scenario_key, scenario, reward, grp, idx, place, length FROM rollouts WHERE file = "
        "(SELECT id FROM files WHERE run = ? AND split = ? AND step = ?) AND reward IS NOT NULL ORDER BY id",
        (run.number, *place),
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


def _mean(side: _Side) -> Interval | None:
    """The mean over all rollouts of a step, as recipes print it."""
    values = [value for rollouts in side.values() for value, _ in rollouts]
    mean, (low, high) = mean_with_interval(values)
    return _interval(Estimate(mean=mean, low=low, high=high, count=len(values))) if values else None


def _interval(value: Estimate) -> Interval:
    low, high = (value.low, value.high) if math.isfinite(value.low) else (None, None)
    return Interval(mean=value.mean, low=low, high=high, num=value.count)
