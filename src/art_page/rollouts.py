"""The table of rollouts, from the index alone; one rollout with what the record knows of it; a group side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from art.errors import NotFoundError
from art_page import conversation as talk
from art_page.conversation import Row, dicts, texts
from art_page.databases import IndexStore, find_in, match_query
from art_page.index_files import Place, judge_name, read_line
from art_page.rollout_answers import (
    GroupAnswer,
    Indexing,
    Item,
    RolloutConversation,
    RolloutDetail,
    RolloutJudgement,
    RolloutKey,
    RolloutTable,
    RolloutTableQuery,
    RolloutTableRow,
    RolloutToolCall,
    Snippet,
    SortKey,
    Tool,
)
from art_page.run_files import RunFiles

_COLUMNS = {
    name: name
    for name in (
        "id", "file", "place", "length", "split", "step", "scenario", "reward", "advantage", "num_turns", "num_tokens",
        "stop", "outcome", "started_at", "duration_s", "policy_version", "judge_score", "metrics",
    )
} | {"group": "grp", "index": "idx", "dropped_because": "dropped"}  # fmt: skip
"""What is read of a rollout from the index: the fields of `RolloutTableRow`, and where its line is."""
_ORDER: dict[SortKey, str] = {
    "reward": "reward", "advantage": "advantage", "tokens": "num_tokens", "turns": "num_turns",
    "started_at": "started_at", "duration": "duration_s", "judge_score": "judge_score",
}  # fmt: skip
_METRIC = "(SELECT value FROM json_each(metrics) WHERE key = ?)"
_COUNTED = {"split", "step", "metric", "sort", "sort_metric", "descending", "offset", "limit"}
"""Parts of a query that choose whole files, or nothing."""
_SNIPPET_S = 0.15
"""Time for the words around matches: they are read from the files of the trajectories."""
_AROUND = 80
"""Characters before and after a match."""
MOST_SHOWN = 32
"""Rewards of one group in a row; larger groups show their first ones."""
MOST_IN_GROUP = 64
_CHANGED = "The file of this {} has changed since it was read; look again in a moment."
_IN_FILE = "file = (SELECT id FROM files WHERE run = ? AND split = ? AND step = ?)"


def list_rollouts(run: RunFiles, query: RolloutTableQuery, indexing: Indexing | None) -> RolloutTable:
    """List one page of the rollouts that match a query.

    Args:
        indexing: how far the index has got.
    """
    store = run.indexer.store
    facets = store.read("SELECT kind, value FROM choices WHERE run = ? ORDER BY value LIMIT 200", (run.number,))
    page = RolloutTable(
        rows=[], total=0, is_total_exact=indexing is None, indexing=indexing,
        stops=[value for kind, value in facets if kind == "stop"],
        dropped=[value for kind, value in facets if kind == "dropped"],
        metrics=[value for kind, value in facets if kind == "metric"],
    )  # fmt: skip
    where, values = _where(run.number, query)
    # Rollouts of whole files are counted already.
    counted = "total(num_rollouts) FROM files"
    if not {name for name, value in query if value is not None} <= _COUNTED:
        counted = "count(*) FROM rollouts"
    search = query.text or ""
    if search.strip():
        match = match_query(search)
        if match is None:  # no word in it
            return page
        where, values = f"{where} AND id IN (SELECT rowid FROM words WHERE words MATCH ?)", [*values, match]
    ((total,),) = store.read(f"SELECT {counted} WHERE {where}", values)
    # Rows without a value come last in both directions.
    direction = "DESC" if query.descending else "ASC"
    order = f"{_ORDER[query.sort]} {direction} NULLS LAST, id {direction}" if query.sort in _ORDER else ""
    if query.sort == "metric" and query.sort_metric is not None:
        order, values = f"{_METRIC} {direction} NULLS LAST, id {direction}", [*values, query.sort_metric]
    order = order or f"step {direction}, id ASC"
    rows = read_rows(run, f"{where} ORDER BY {order} LIMIT ? OFFSET ?", (*values, query.limit, query.offset))
    snippets = _snippets(run, rows, search) if search.strip() else {}
    rewards = read_group_rewards(store, [(row["file"], row["group"]) for row in rows])
    for row in rows:
        listed = make_row(row)
        listed.snippet, listed.group_rewards = snippets.get(row["id"]), rewards.get((row["file"], row["group"]))
        page.rows.append(listed)
    page.total = int(total)
    return page


def _where(number: int, query: RolloutTableQuery) -> tuple[str, list[Any]]:
    """The conditions of a query, in SQL with parameters."""
    conditions: list[tuple[str, Any]] = [
        ("run = ?", number), ("split = ?", query.split), ("step = ?", query.step), ("grp = ?", query.group),
        ("outcome = ?", query.outcome), ("stop = ?", query.stop), ("scenario = ?", query.scenario),
        ("reward >= ?", query.min_reward), ("reward <= ?", query.max_reward),
    ]  # fmt: skip
    if query.dropped == "any":
        conditions.append(("dropped >= ?", ""))  # every text is, and unlike `IS NOT NULL` it can use the index
    elif query.dropped == "none":
        conditions.append(("trained = ?", 1))
    else:
        conditions.append(("dropped = ?", query.dropped))
    given = [(term, value) for term, value in conditions if value is not None]
    terms, values = [term for term, _ in given], [value for _, value in given]
    for sign, bound in ((">=", query.min_metric), ("<=", query.max_metric)):
        if bound is not None and query.metric is not None:
            terms.append(f"{_METRIC} {sign} ?")
            values += [query.metric, bound]
    return " AND ".join(terms), values


def read_rows(run: RunFiles, where: str, parameters: Sequence[Any]) -> list[Row]:
    """Read rollouts from the index, as `_COLUMNS` names what is known of each."""
    rows = run.indexer.store.read(f"SELECT {', '.join(_COLUMNS.values())} FROM rollouts WHERE {where}", parameters)
    return [dict(zip(_COLUMNS, row, strict=True)) for row in rows]


def make_row(row: Row) -> RolloutTableRow:
    """Make a row of the table."""
    known = {name: row[name] for name in _COLUMNS.keys() & RolloutTableRow.model_fields.keys()}
    return RolloutTableRow(**known | {"metrics": orjson.loads(row["metrics"] or "{}")})


def places_of(query: RolloutTableQuery) -> list[Place]:
    """The split and step that a query is limited to, which must be indexed before it is answered."""
    if query.step is None:
        return []
    return [(split, query.step) for split in ([query.split] if query.split else ["train", "val", "test"])]


def _snippets(run: RunFiles, rows: Sequence[Row], search: str) -> dict[int, Snippet]:
    """Find the words around the first match in each rollout, as far as there is time."""
    snippets: dict[int, Snippet] = {}
    groups: dict[tuple[str, int, int], Row | None] = {}
    deadline = time.monotonic() + _SNIPPET_S
    for row in rows:
        if time.monotonic() > deadline:
            break
        key = (row["split"], row["step"], row["place"])
        if key not in groups:
            groups[key] = read_line(run.paths.trajectories(row["split"], row["step"]), row["place"], row["length"])
        rollout = member(groups[key], row["index"])
        for text in texts(rollout) if "messages_and_choices" in rollout else (str(rollout.get("message", "")),):
            if (span := find_in(text, search)) is not None:
                begin, end = max(0, span[0] - _AROUND), min(len(text), span[1] + _AROUND)
                snippets[row["id"]] = Snippet(
                    text=text[begin:end], start=span[0] - begin, end=min(span[1], end) - begin
                )  # fmt: skip
                break
    return snippets


def member(group: Row | None, index: int) -> Row:
    """Return a trajectory of a logged group, or its exception; those follow the trajectories."""
    members = [] if group is None else [*dicts(group.get("trajectories")), *dicts(group.get("exceptions"))]
    return members[index] if index < len(members) else {}


def read_group_rewards(
    store: IndexStore, groups: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], list[float | None]]:
    """Read the rewards of groups.

    Args:
        groups: each by its file in the index and its number in the file.

    Returns:
        For each group the rewards by index, at most 32; null for a rollout without one.
    """
    rewards: dict[tuple[int, int], list[float | None]] = {}
    rows = store.read(
        "SELECT file, grp, reward FROM json_each(?) AS pair JOIN rollouts ON file = pair.value ->> 0 "
        "AND grp = pair.value ->> 1 AND idx < ? ORDER BY file, grp, idx",
        (orjson.dumps(sorted(set(groups))).decode(), MOST_SHOWN),
    )
    for file, group, reward in rows:
        rewards.setdefault((file, group), []).append(reward)
    return rewards


def read_rollout(run: RunFiles, key: RolloutKey) -> RolloutDetail:
    """Describe one rollout.

    Raises:
        NotFoundError: there is no such rollout.
    """
    row = find_row(run, key)
    content = member(read_line(run.paths.trajectories(key.split, key.step), row["place"], row["length"]), key.index)
    detail = describe(run, row, content, None if content else _CHANGED.format("rollout"))
    sql = "SELECT grp, idx FROM rollouts WHERE file = ? ORDER BY grp, idx"
    places = run.indexer.store.read(sql, (row["file"],))
    at = places.index((key.group, key.index))
    detail.previous, detail.next = (
        key.model_copy(update={"group": places[near][0], "index": places[near][1]}) if 0 <= near < len(places) else None
        for near in (at - 1, at + 1)
    )
    return detail


def find_row(run: RunFiles, key: RolloutKey) -> Row:
    """Return what the index knows of one rollout.

    Raises:
        NotFoundError: there is no such rollout.
    """
    where = f"{_IN_FILE} AND grp = ? AND idx = ?"
    rows = read_rows(run, where, (run.number, key.split, key.step, key.group, key.index))
    if not rows:
        raise NotFoundError(
            f"{run.project}/{run.name} has no rollout {key.index} in group {key.group} of step {key.step} ({key.split})"
        )
    return rows[0]


def describe(run: RunFiles, row: Row, content: Row, missing: str | None) -> RolloutDetail:
    """Describe a rollout by its row in the index and its trajectory or exception."""
    histories = [
        RolloutConversation(
            name="main" if number == 0 else f"further {number}",
            items=[_item(message, choice) for message, choice in talk.items(history)],
            tools=[_tool(tool) for tool in dicts(history.get("tools"))],
        )
        for number, history in enumerate(talk.histories(content))
        if isinstance(history.get("messages_and_choices"), list)
    ]
    error = None
    if {"type", "traceback"} <= content.keys():
        kind, text, traceback = (talk.as_text(content.get(name)) for name in ("type", "message", "traceback"))
        error = f"{kind}: {text}\n\n{traceback}".strip()
    return RolloutDetail(
        **make_row(row).model_dump() | {"metrics": _metrics(content)}, histories=histories, logs=_logs(content),
        metadata={str(name): _plain(value) for name, value in talk.mapping(content.get("metadata")).items()},
        judge=judgement(content), error=error, missing=missing,
    )  # fmt: skip


def _metrics(content: Row) -> dict[str, float | None]:
    return {str(name): talk.number(value) for name, value in talk.mapping(content.get("metrics")).items()}


def _logs(content: Row) -> list[str]:
    logs = content.get("logs")
    return [line for line in logs if isinstance(line, str)] if isinstance(logs, list) else []


def judgement(content: Row) -> RolloutJudgement | None:
    """Return what the judge said that gave the reward; `None` if no judge did."""
    metrics = talk.mapping(content.get("metrics"))
    name = judge_name(metrics)
    if name is None:
        return None
    own = {metric.removeprefix(f"{name}/"): value for metric, value in metrics.items() if metric.startswith(f"{name}/")}
    parts = {part: value for part in sorted(own) if (value := talk.number(own[part])) is not None}
    passes = [parts.pop(part) for part in list(parts) if part.startswith("pass_")]
    begin = f"{name.upper()} explanation: "
    said = [line for line in _logs(content) if line.startswith(begin)]
    return RolloutJudgement(
        name=name, score=talk.number(metrics.get(f"{name}_score")), passes=passes or None, parts=parts,
        disagreement=statistics.stdev(passes) if len(passes) > 1 else None,
        explanation=said[-1].removeprefix(begin) if said else None,
    )  # fmt: skip


def _item(message: Row, choice: Row | None) -> Item:
    item = Item(
        role=str(message.get("role") or ("assistant" if choice else "unknown")),
        text=talk.as_text(message.get("content")), reasoning=talk.reasoning(message),
        tool_calls=[RolloutToolCall(id=i, name=name, arguments=text) for i, name, text in talk.tool_calls(message)],
        tool_call_id=talk.text_or_none(message.get("tool_call_id")),
    )  # fmt: skip
    if choice is None:
        return item
    item.is_sampled = True
    item.exchange_id = talk.text_or_none(choice.get("exchange_id"))
    item.finish_reason = talk.text_or_none(choice.get("finish_reason"))
    item.num_tokens = talk.num_tokens(choice)
    recorded = talk.exchange(choice)
    item.policy_version = talk.whole(recorded.get("policy_version"))
    item.started_at, ended_at = (talk.number(recorded.get(name)) for name in ("started_at", "ended_at"))
    if item.started_at is not None and ended_at is not None:
        item.duration_s = max(0.0, ended_at - item.started_at)
    return item


def _tool(tool: Row) -> Tool:
    function = talk.mapping(tool.get("function")) or tool
    parameters, description = function.get("parameters"), talk.text_or_none(function.get("description"))
    parameters = parameters if isinstance(parameters, dict) else None
    return Tool(name=str(function.get("name") or ""), description=description, parameters=parameters)


def _plain(value: Any) -> str | float | bool | None:
    if value is None or isinstance(value, (bool, str)):
        return value
    return talk.number(value) if isinstance(value, (int, float)) else orjson.dumps(value, default=str).decode()


def read_group(run: RunFiles, split: str, step: int, group: int) -> GroupAnswer:
    """Describe a group.

    Raises:
        NotFoundError: there is no such group.
    """
    where = f"{_IN_FILE} AND grp = ? ORDER BY advantage DESC NULLS LAST, reward DESC NULLS LAST, idx"
    rows = read_rows(run, where, (run.number, split, step, group))
    if not rows:
        raise NotFoundError(f"{run.project}/{run.name} has no group {group} in step {step} of {split}")
    first = rows[0]
    content = read_line(run.paths.trajectories(split, step), first["place"], first["length"])
    members = {index: member(content, index) for index in range(len(rows))}
    shown = [describe(run, row, members.get(row["index"], {}), None) for row in rows[:MOST_IN_GROUP]]
    reasons = {row["dropped_because"] for row in rows}
    return GroupAnswer(
        split=split, step=step, group=group, scenario=first["scenario"], rollouts=shown, num_rollouts=len(rows),
        metrics=_metrics(content or {}), logs=_logs(content or {}),
        dropped_because=reasons.pop() if len(reasons) == 1 else None,
        missing=_CHANGED.format("group") if content is None else None,
    )  # fmt: skip
