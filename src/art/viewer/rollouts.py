"""The table of rollouts, from the index alone; one rollout with what the record knows of it; a group side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import orjson

from art.errors import NotFoundError
from art.viewer import conversation as talk
from art.viewer.conversation import Row, dicts, texts
from art.viewer.index.files import Place, as_trajectory, find_exchanges, judge_name, planned_rollouts, read_line
from art.viewer.index.store import IndexStore, find_in, match_query
from art.viewer.rollout_answers import (
    Conversation,
    GroupAnswer,
    Indexing,
    Item,
    Judgement,
    RolloutDetail,
    RolloutKey,
    RolloutPage,
    RolloutQuery,
    RolloutRow,
    Snippet,
    SortKey,
    Tool,
    ToolCall,
)
from art.viewer.run_files import RunFiles

COLUMNS = (
    "id", "file", "place", "length", "split", "step", "grp", "idx", "scenario", "reward", "advantage", "num_turns",
    "num_tokens", "stop", "outcome", "dropped", "started_at", "duration_s", "policy_version", "judge_score",
)  # fmt: skip
_FILE, _GROUP = COLUMNS.index("file"), COLUMNS.index("grp")
_ORDER: dict[SortKey, str] = {
    "reward": "reward", "advantage": "advantage", "tokens": "num_tokens", "turns": "num_turns",
    "started_at": "started_at", "duration": "duration_s", "judge_score": "judge_score",
}  # fmt: skip
_COUNTED = {"split", "step", "sort", "descending", "offset", "limit"}
"""Parts of a query that choose whole files, or nothing."""
_SNIPPET_S = 0.15
"""Time for the words around matches: they are read from the files of the trajectories."""
_AROUND = 80
"""Characters before and after a match."""


def list_rollouts(run: RunFiles, number: int, query: RolloutQuery, indexing: Indexing | None) -> RolloutPage:
    """List one page of the rollouts that match a query.

    Args:
        number: number of the run in the index.
        indexing: how far the index has got.
    """
    store = run.indexer.store
    facets = store.read("SELECT kind, value FROM choices WHERE run = ? ORDER BY value LIMIT 200", (number,))
    page = RolloutPage(
        rows=[],
        total=0,
        is_total_exact=indexing is None,
        indexing=indexing,
        stops=[value for kind, value in facets if kind == "stop"],
        dropped=[value for kind, value in facets if kind == "dropped"],
    )
    match = None
    if query.text is not None and query.text.strip():
        match = match_query(query.text)
        if match is None:  # no word in it
            return page
    page.total, rows = _find(store, number, query, match)
    snippets = _snippets(run, rows, query.text or "") if match else {}
    page.rows = [make_row(row, snippets.get(row[0])) for row in rows]
    in_group = [(row[_FILE], row[_GROUP]) for row in rows]
    rewards = read_group_rewards(store, in_group)
    for listed, group in zip(page.rows, in_group, strict=True):
        listed.group_rewards = rewards.get(group)
    return page


def _find(store: IndexStore, number: int, query: RolloutQuery, match: str | None) -> tuple[int, list[tuple[Any, ...]]]:
    """Count the rollouts that match a query, and read one page of them."""
    where, values = _where(number, query)
    if match is not None:
        where, values = f"{where} AND id IN (SELECT rowid FROM words WHERE words MATCH ?)", [*values, match]
    page = f"SELECT {', '.join(COLUMNS)} FROM rollouts WHERE {where} ORDER BY {_order(query)} LIMIT ? OFFSET ?"
    # Rollouts of whole files are counted already.
    is_whole = match is None and {name for name, value in query if value is not None} <= _COUNTED
    count = "total(num_rollouts) FROM files" if is_whole else "count(*) FROM rollouts"
    ((total,),) = store.read(f"SELECT {count} WHERE {where}", values)
    return int(total), store.read(page, (*values, query.limit, query.offset))


def make_row(row: Sequence[Any], snippet: Snippet | None = None) -> RolloutRow:
    """Make a row of the table from the index's columns `COLUMNS`."""
    values = dict(zip(COLUMNS, row, strict=True))
    return RolloutRow(
        **{
            name: values[name]
            for name in (
                "split", "step", "scenario", "reward", "advantage", "num_turns", "num_tokens", "stop", "outcome",
                "started_at", "duration_s", "policy_version", "judge_score",
            )
        },
        group=values["grp"],
        index=values["idx"],
        dropped_because=values["dropped"],
        is_logged=values["length"] > 0,
        snippet=snippet,
    )  # fmt: skip


def places_of(query: RolloutQuery) -> list[Place]:
    """The split and step that a query is limited to, which must be indexed before it is answered."""
    if query.step is None:
        return []
    return [(split, query.step) for split in ([query.split] if query.split else ["train", "val", "test"])]


def _where(number: int, query: RolloutQuery) -> tuple[str, list[Any]]:
    """The conditions of a query, in SQL with parameters."""
    terms = ["run = ?"]
    values: list[Any] = [number]
    equal = {"split": query.split, "step": query.step, "grp": query.group, "outcome": query.outcome,
             "stop": query.stop, "scenario": query.scenario}  # fmt: skip
    for column, value in equal.items():
        if value is not None:
            terms.append(f"{column} = ?")
            values.append(value)
    for sign, bound in ((">=", query.min_reward), ("<=", query.max_reward)):
        if bound is not None:
            terms.append(f"reward {sign} ?")
            values.append(bound)
    if query.dropped == "any":
        terms.append("dropped >= ''")  # every text is, and unlike `IS NOT NULL` it can use the index
    elif query.dropped == "none":
        terms.append("trained = 1")
    elif query.dropped is not None:
        terms.append("dropped = ?")
        values.append(query.dropped)
    return " AND ".join(terms), values


def _order(query: RolloutQuery) -> str:
    """The order of the rows. Those without a value come last in both directions."""
    direction = "DESC" if query.descending else "ASC"
    if query.sort == "step":
        return f"step {direction}, id ASC"
    return f"{_ORDER[query.sort]} {direction} NULLS LAST, id {direction}"


def _snippets(run: RunFiles, rows: Sequence[Sequence[Any]], search: str) -> dict[int, Snippet]:
    """Find the words around the first match in each trajectory, as far as there is time."""
    snippets: dict[int, Snippet] = {}
    groups: dict[tuple[str, int, int], Row | None] = {}
    deadline = time.monotonic() + _SNIPPET_S
    for row in rows:
        values = dict(zip(COLUMNS, row, strict=True))
        if not values["length"] or time.monotonic() > deadline:
            continue
        key = (values["split"], values["step"], values["place"])
        if key not in groups:
            path = run.paths.trajectories(values["split"], values["step"])
            groups[key] = read_line(path, values["place"], values["length"])
        snippet = snippet_of(member(groups[key], values["idx"]), search)
        if snippet is not None:
            snippets[values["id"]] = snippet
    return snippets


def member(group: Row | None, index: int) -> Row:
    """Return a trajectory of a logged group, or its exception; those follow the trajectories."""
    if group is None:
        return {}
    members = [*dicts(group.get("trajectories")), *dicts(group.get("exceptions"))]
    return members[index] if index < len(members) else {}


def snippet_of(rollout: Row, search: str) -> Snippet | None:
    """Return the words around the first match of a search in a rollout."""
    pieces = texts(rollout) if "messages_and_choices" in rollout else (str(rollout.get("message", "")),)
    for text in pieces:
        if (span := find_in(text, search)) is not None:
            begin, end = max(0, span[0] - _AROUND), min(len(text), span[1] + _AROUND)
            return Snippet(text=text[begin:end], start=span[0] - begin, end=min(span[1], end) - begin)
    return None


MOST_SHOWN = 32
"""Rewards of one group in a row; larger groups show their first ones."""

_SELECT = """
SELECT file, grp, idx, reward FROM json_each(?) AS pair
JOIN rollouts ON file = pair.value ->> 0 AND grp = pair.value ->> 1 AND idx < ?
ORDER BY file, grp, idx
"""


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
    rows = store.read(_SELECT, (orjson.dumps(sorted(set(groups))).decode(), MOST_SHOWN))
    for file, group, _, reward in rows:
        rewards.setdefault((file, group), []).append(reward)
    return rewards


_ROLLOUT_CHANGED = "The file of this rollout has changed since it was read; look again in a moment."
_FORGOTTEN = "Nobody logged this rollout, and the server has deleted its record of it: only its numbers are known."
_PASS = "/pass_"


class _AnswerFacts(NamedTuple):
    """What the record knows of one answer."""

    policy_version: int
    num_tokens: int
    created_at: float


def read_rollout(run: RunFiles, number: int, key: RolloutKey) -> RolloutDetail:
    """Describe one rollout.

    Args:
        number: number of the run in the index.

    Raises:
        NotFoundError: there is no such rollout.
    """
    row = find_row(run, number, key)
    values = dict(zip(COLUMNS, row, strict=True))
    if values["length"]:
        group = read_line(run.paths.trajectories(key.split, key.step), values["place"], values["length"])
        content = member(group, key.index)
        missing = None if content else _ROLLOUT_CHANGED
    else:
        content = trained_rollouts(run, key.step).get((key.group, key.index), {})
        missing = None if content.get("messages_and_choices") else _FORGOTTEN
    detail = describe(run, row, content, missing)
    detail.previous, detail.next = _neighbour(run, values, before=True), _neighbour(run, values, before=False)
    return detail


def find_row(run: RunFiles, number: int, key: RolloutKey) -> tuple[Any, ...]:
    """Return the index's columns of one rollout.

    Raises:
        NotFoundError: there is no such rollout.
    """
    rows = run.indexer.store.read(
        f"SELECT {', '.join(COLUMNS)} FROM rollouts WHERE file = (SELECT id FROM files WHERE run = ? AND split = ? "
        "AND step = ?) AND grp = ? AND idx = ?",
        (number, key.split, key.step, key.group, key.index),
    )
    if not rows:
        raise NotFoundError(
            f"{run.project}/{run.name} has no rollout {key.index} in group {key.group} of step {key.step} ({key.split})"
        )
    return rows[0]


def trained_rollouts(run: RunFiles, step: int) -> dict[tuple[int, int], Row]:
    """Rebuild the rollouts of a step that nobody logged from the record, by group and index."""
    rollouts = list(planned_rollouts(run.paths.step(step)))
    exchanges = find_exchanges(run.database, chain.from_iterable(rollout.exchange_ids for rollout in rollouts))
    return {(r.group, r.place): as_trajectory(run.database, r, exchanges) for r in rollouts}


def describe(run: RunFiles, row: Sequence[Any], content: Row, missing: str | None) -> RolloutDetail:
    """Describe a rollout by its row in the index and its trajectory or exception."""
    answers = _answers(run, talk.exchange_ids(content))
    logs = content.get("logs")
    return RolloutDetail(
        **make_row(row).model_dump(),
        histories=[
            _conversation(history, number, answers)
            for number, history in enumerate(talk.histories(content))
            if isinstance(history.get("messages_and_choices"), list)
        ],
        metrics={str(name): talk.number(value) for name, value in talk.mapping(content.get("metrics")).items()},
        metadata={str(name): _plain(value) for name, value in talk.mapping(content.get("metadata")).items()},
        logs=[line for line in logs if isinstance(line, str)] if isinstance(logs, list) else [],
        judge=judgement(content),
        error=_error(content),
        missing=missing,
    )


def judgement(content: Row) -> Judgement | None:
    """Return what the judge said that gave the reward; `None` if no judge did."""
    metrics = talk.mapping(content.get("metrics"))
    name = judge_name(metrics)
    if name is None:
        return None
    passes = [
        value
        for metric in sorted(metrics)
        if metric.startswith(name + _PASS) and (value := talk.number(metrics[metric])) is not None
    ]
    parts = {
        metric.removeprefix(f"{name}/"): value
        for metric in sorted(metrics)
        if metric.startswith(f"{name}/")
        and not metric.startswith(name + _PASS)
        and (value := talk.number(metrics[metric])) is not None
    }
    begin = f"{name.upper()} explanation: "
    said = [line for line in content.get("logs") or [] if isinstance(line, str) and line.startswith(begin)]
    return Judgement(
        name=name,
        score=talk.number(metrics.get(f"{name}_score")),
        passes=passes or None,
        disagreement=statistics.stdev(passes) if len(passes) > 1 else None,
        parts=parts,
        explanation=said[-1].removeprefix(begin) if said else None,
    )


def _answers(run: RunFiles, exchange_ids: Sequence[str]) -> dict[str, _AnswerFacts]:
    if not exchange_ids:
        return {}
    rows = run.database.read(
        "SELECT id, policy_version, length(completion) / 4, created_at FROM exchanges "
        "WHERE id IN (SELECT value FROM json_each(?))",
        (orjson.dumps(list(exchange_ids)).decode(),),
    )
    return {exchange_id: _AnswerFacts(*values) for exchange_id, *values in rows}


def _conversation(history: Row, number: int, answers: Mapping[str, _AnswerFacts]) -> Conversation:
    return Conversation(
        name="main" if number == 0 else f"further {number}",
        items=[_item(message, choice, answers) for message, choice in talk.items(history)],
        tools=[_tool(tool) for tool in talk.dicts(history.get("tools"))],
    )


def _item(message: Row, choice: Row | None, answers: Mapping[str, _AnswerFacts]) -> Item:
    item = Item(
        role=str(message.get("role") or ("assistant" if choice else "unknown")),
        text=talk.as_text(message.get("content")),
        reasoning=talk.reasoning(message),
        tool_calls=[ToolCall(id=i, name=name, arguments=arguments) for i, name, arguments in talk.tool_calls(message)],
        tool_call_id=talk.text_or_none(message.get("tool_call_id")),
    )
    if choice is None:
        return item
    item.is_sampled = True
    item.exchange_id = talk.text_or_none(choice.get("exchange_id"))
    item.finish_reason = talk.text_or_none(choice.get("finish_reason"))
    item.num_tokens = talk.num_logprobs(choice)
    if (answer := answers.get(item.exchange_id or "")) is not None:
        item.policy_version, item.num_tokens = answer.policy_version, answer.num_tokens
        asked = asked_at(item.exchange_id)
        item.started_at = asked or answer.created_at
        item.duration_s = None if asked is None else max(0.0, answer.created_at - asked)
    return item


def asked_at(exchange_id: str | None) -> float | None:
    """Return when an exchange began, which its id says in microseconds since the epoch."""
    digits = (exchange_id or "").removeprefix("ex_")[:14]
    try:
        return int(digits, 16) / 1e6 if len(digits) == 14 else None
    except ValueError:
        return None


def _tool(tool: Row) -> Tool:
    function = talk.mapping(tool.get("function")) or tool
    parameters = function.get("parameters")
    return Tool(
        name=str(function.get("name") or ""),
        description=talk.text_or_none(function.get("description")),
        parameters=parameters if isinstance(parameters, dict) else None,
    )


def _error(content: Row) -> str | None:
    if not {"type", "traceback"} <= content.keys():
        return None
    name, text, traceback = (talk.as_text(content.get(field)) for field in ("type", "message", "traceback"))
    return f"{name}: {text}\n\n{traceback}".strip()


def _plain(value: Any) -> str | float | bool | None:
    if value is None or isinstance(value, (bool, str)):
        return value
    return talk.number(value) if isinstance(value, (int, float)) else orjson.dumps(value, default=str).decode()


def _neighbour(run: RunFiles, values: Mapping[str, Any], *, before: bool) -> RolloutKey | None:
    sign, direction = ("<", "DESC") if before else (">", "ASC")
    rows = run.indexer.store.read(
        f"SELECT grp, idx FROM rollouts WHERE file = ? AND (grp, idx) {sign} (?, ?) "
        f"ORDER BY grp {direction}, idx {direction} LIMIT 1",
        (values["file"], values["grp"], values["idx"]),
    )
    if not rows:
        return None
    return RolloutKey(split=values["split"], step=values["step"], group=rows[0][0], index=rows[0][1])


MOST_IN_GROUP = 64
_GROUP_CHANGED = "The file of this group has changed since it was read; look again in a moment."


def read_group(run: RunFiles, number: int, split: str, step: int, group: int) -> GroupAnswer:
    """Describe a group.

    Args:
        number: number of the run in the index.

    Raises:
        NotFoundError: there is no such group.
    """
    rows = run.indexer.store.read(
        f"SELECT {', '.join(COLUMNS)} FROM rollouts WHERE file = (SELECT id FROM files WHERE run = ? AND split = ? "
        "AND step = ?) AND grp = ? ORDER BY advantage DESC NULLS LAST, reward DESC NULLS LAST, idx",
        (number, split, step, group),
    )
    if not rows:
        raise NotFoundError(f"{run.project}/{run.name} has no group {group} in step {step} of {split}")
    first = dict(zip(COLUMNS, rows[0], strict=True))
    content: Row | None = None
    if first["length"]:
        content = read_line(run.paths.trajectories(split, step), first["place"], first["length"])
        members = {index: member(content, index) for index in range(len(rows))}
    else:
        members = {index: row for (place, index), row in trained_rollouts(run, step).items() if place == group}
    shown = [describe(run, row, members.get(row[COLUMNS.index("idx")], {}), None) for row in rows[:MOST_IN_GROUP]]
    metrics = talk.mapping((content or {}).get("metrics"))
    logs = (content or {}).get("logs")
    reasons = {row[COLUMNS.index("dropped")] for row in rows}
    return GroupAnswer(
        split=split,
        step=step,
        group=group,
        scenario=first["scenario"],
        rollouts=shown,
        num_rollouts=len(rows),
        metrics={str(name): talk.number(value) for name, value in metrics.items()},
        logs=[line for line in logs if isinstance(line, str)] if isinstance(logs, list) else [],
        judges=_judges(shown, metrics),
        dropped_because=reasons.pop() if len(reasons) == 1 else None,
        missing=_GROUP_CHANGED if first["length"] and content is None else None,
    )


def _judges(rollouts: Sequence[RolloutDetail], metrics: Row) -> list[Judgement]:
    """Describe each judge of the group: the mean of its scores, and its disagreement with itself."""
    judged = [rollout.judge for rollout in rollouts if rollout.judge is not None]
    judgements = []
    for name in dict.fromkeys(judge.name for judge in judged):
        own = [judge for judge in judged if judge.name == name]
        scores = [judge.score for judge in own if judge.score is not None]
        passes = [judge.passes for judge in own if judge.passes is not None]
        same_number = len({len(values) for values in passes}) == 1
        judgements.append(
            Judgement(
                name=name,
                score=statistics.fmean(scores) if scores else None,
                passes=[statistics.fmean(values) for values in zip(*passes, strict=True)] if same_number else None,
                disagreement=talk.number(metrics.get("judge_disagreement")),
            )
        )
    return judgements
