"""The table of rollouts: filters, order and pages, from the index alone; and the words around a match."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from art.viewer.answers.base import Indexing
from art.viewer.answers.rollout_rows import RolloutPage, RolloutQuery, RolloutRow, Snippet, SortKey
from art.viewer.conversation import Row, dicts, texts
from art.viewer.index.files import Place, read_line
from art.viewer.index.search import find_in, match_query
from art.viewer.index.store import IndexStore
from art.viewer.reads.group_rewards import read_group_rewards
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
_SELECTED = ", ".join(COLUMNS)
_AMONG = "id IN (SELECT value FROM json_each(?))"
_MOST_HITS = 15_000
"""A search with more matches is not counted to the end, if the page can be found without that."""
_MOST_WALKED = 2000
"""Rollouts that are looked at one after the other for such a page."""
_WALKED_AT_ONCE = 150
_AROUND = 80
"""Characters before and after a match."""


class _Matches(NamedTuple):
    """One page of a search."""

    total: int
    rows: list[tuple[Any, ...]]
    is_exact: bool = True
    """Whether `total` counts all matches; else there may be more."""


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
    if match is None:
        page.total, rows = _find(store, number, query)
    else:
        matches = _search(store, number, query, match)
        page.total, rows = matches.total, matches.rows
        page.is_total_exact = page.is_total_exact and matches.is_exact
    snippets = _snippets(run, rows, query.text or "") if match else {}
    page.rows = [make_row(row, snippets.get(row[0])) for row in rows]
    in_group = [(row[_FILE], row[_GROUP]) for row in rows]
    rewards = read_group_rewards(store, in_group)
    for listed, group in zip(page.rows, in_group, strict=True):
        listed.group_rewards = rewards.get(group)
    return page


def _find(store: IndexStore, number: int, query: RolloutQuery) -> tuple[int, list[tuple[Any, ...]]]:
    """Count the rollouts that match a query without a search, and read one page of them."""
    where, values = _where(number, query)
    page = f"SELECT {_SELECTED} FROM rollouts WHERE {where} ORDER BY {_order(query)} LIMIT ? OFFSET ?"
    return _count(store, number, query), store.read(page, (*values, query.limit, query.offset))


def _search(store: IndexStore, number: int, query: RolloutQuery, match: str) -> _Matches:
    """Find one page of the rollouts that match a query with a search."""
    hits = "SELECT rowid FROM words WHERE words MATCH ?"
    values: list[Any] = [match]
    if query.step is not None:  # only words of the step are looked up
        step_rows = "SELECT min(id), max(id) FROM rollouts WHERE run = ? AND step = ?"
        ((first, last),) = store.read(step_rows, (number, query.step))
        hits, values = f"{hits} AND rowid BETWEEN ? AND ?", [match, first or 0, last or 0]
    ids = [row_id for (row_id,) in store.read(f"{hits} LIMIT ?", (*values, _MOST_HITS + 1))]
    if len(ids) > _MOST_HITS:
        matches = _walk(store, number, query, match)
        if matches is not None:
            where, conditions = _where(number, query)
            known = store.read(f"SELECT count(*) FROM rollouts WHERE {where} AND {_AMONG}", (*conditions, _json(ids)))
            return matches._replace(total=max(matches.total, known[0][0]))
        ids = [row_id for (row_id,) in store.read(hits, values)]
    where, values = _where(number, query)
    among = f"FROM rollouts WHERE {where} AND {_AMONG}"
    values.append(_json(ids))
    page = f"SELECT {_SELECTED} {among} ORDER BY {_order(query)} LIMIT ? OFFSET ?"
    rows = store.read(page, (*values, query.limit, query.offset))
    return _Matches(int(store.read(f"SELECT count(*) {among}", values)[0][0]), rows)


def _walk(store: IndexStore, number: int, query: RolloutQuery, match: str) -> _Matches | None:
    """Find one page by looking for the words in one rollout after the other, in the order of the page.

    That is quick for words that many rollouts have, which take long to count and sort.

    Returns:
        The page, whose `total` counts what was passed on the way; `None` where it is too far down or has too few
        matches among the first rollouts.
    """
    where, values = _where(number, query)
    ordered = f"SELECT id FROM rollouts WHERE {where} ORDER BY {_order(query)} LIMIT ?"
    ids = [row_id for (row_id,) in store.read(ordered, (*values, _MOST_WALKED))]
    matching: list[int] = []
    hits = "SELECT rowid FROM words WHERE words MATCH ? AND rowid IN (SELECT value FROM json_each(?))"
    needed, is_whole = query.offset + query.limit, len(ids) < _MOST_WALKED
    for start in range(0, len(ids), _WALKED_AT_ONCE):
        chunk = ids[start : start + _WALKED_AT_ONCE]
        with_words = {row_id for (row_id,) in store.read(hits, (match, _json(chunk)))}
        matching += [row_id for row_id in chunk if row_id in with_words]
        if len(matching) >= needed and start + len(chunk) < len(ids):
            is_whole = False
            break
    if len(matching) < needed and not is_whole:
        return None
    shown = matching[query.offset : needed]
    rows = {row[0]: row for row in store.read(f"SELECT {_SELECTED} FROM rollouts WHERE {_AMONG}", (_json(shown),))}
    return _Matches(len(matching), [rows[row_id] for row_id in shown if row_id in rows], is_exact=is_whole)


def _json(ids: list[int]) -> str:
    return orjson.dumps(ids).decode()


def _count(store: IndexStore, number: int, query: RolloutQuery) -> int:
    """Count the rollouts that match a query without a search. Those of whole files are counted already."""
    where, values = _where(number, query)
    if {name for name, value in query if value is not None} <= _COUNTED:
        return int(store.read(f"SELECT total(num_rollouts) FROM files WHERE {where}", values)[0][0])
    return int(store.read(f"SELECT count(*) FROM rollouts WHERE {where}", values)[0][0])


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
