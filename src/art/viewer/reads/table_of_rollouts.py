"""The table of rollouts: filters, order and pages, from the index alone; and the words around a match."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

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
    """Count the rollouts that match, and read one page of them."""
    where, values = _where(number, query)
    if match is None:
        page = f"SELECT {', '.join(COLUMNS)} FROM rollouts WHERE {where} ORDER BY {_order(query)} LIMIT ? OFFSET ?"
        return _count(store, number, query), store.read(page, (*values, query.limit, query.offset))
    # The words are looked up once for both, and only among the rollouts of a step, where there is one.
    hits = "SELECT rowid FROM words WHERE words MATCH ?"
    match_values: list[Any] = [match]
    if query.step is not None:
        step_rows = "SELECT min(id), max(id) FROM rollouts WHERE run = ? AND step = ?"
        ((first, last),) = store.read(step_rows, (number, query.step))
        hits += " AND rowid BETWEEN ? AND ?"
        match_values += [first or 0, last or 0]
    hits = f"WITH hits AS MATERIALIZED ({hits})"
    among = f"FROM rollouts WHERE {where} AND id IN (SELECT rowid FROM hits)"
    rows = store.read(
        f"{hits} SELECT (SELECT count(*) {among}), {', '.join(COLUMNS)} {among} "
        f"ORDER BY {_order(query)} LIMIT ? OFFSET ?",
        (*match_values, *values, *values, query.limit, query.offset),
    )
    if rows or not query.offset:
        return (rows[0][0] if rows else 0), [row[1:] for row in rows]
    return store.read(f"{hits} SELECT count(*) {among}", (*match_values, *values))[0][0], []


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
