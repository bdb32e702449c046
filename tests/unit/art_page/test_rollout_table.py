"""The table of rollouts: filters, order, pages and the search."""

from __future__ import annotations

import pytest

from art.storage.layout import DataDir
from art.trajectory import TrajectoryGroup
from art_page.databases import find_in, match_query
from art_page.rollout_answers import RolloutTable, RolloutTableQuery
from art_page.viewer import Viewer
from tests.support.viewer_dirs import RUN, log, rollout


def rows(viewer: Viewer, **query: object) -> RolloutTable:
    asked = RolloutTableQuery.model_validate(query)
    while not (answer := viewer.rollouts(*RUN, asked)).is_total_exact:
        pass
    return answer


@pytest.fixture
def logged(viewer: Viewer, data_dir: DataDir) -> Viewer:
    for step in (1, 2, 3):
        groups = [TrajectoryGroup([rollout(step + 0.1 * i, scenario=f"s{g}") for i in range(4)]) for g in range(2)]
        log(data_dir, groups, step=step)
    log(data_dir, [TrajectoryGroup([rollout(0.5), ValueError("no answer")])], step=3, split="val")
    return viewer


def test_pages_follow_each_other_without_gaps(logged: Viewer) -> None:
    whole = rows(logged, limit=1000)
    assert whole.total == 26
    pages = [rows(logged, limit=7, offset=offset).rows for offset in range(0, 26, 7)]
    assert [row for page in pages for row in page] == whole.rows
    assert [row.step for row in whole.rows] == [3] * 10 + [2] * 8 + [1] * 8


def test_the_numbers_of_the_task_are_shown_sorted_and_filtered(viewer: Viewer, data_dir: DataDir) -> None:
    numbers = [{"win": 1.0, 'odd "$.name': 3.0}, {"win": 0.0, "moves": 2}, {"win": 1.0, "moves": 9}]
    group = TrajectoryGroup([rollout(0.5, metrics=metrics) for metrics in numbers])
    log(data_dir, [group], step=1)
    listed = rows(viewer)
    assert listed.metrics == ["moves", 'odd "$.name', "win"]
    assert [row.metrics for row in listed.rows] == numbers

    def found(**query: object) -> list[int]:
        return [row.index for row in rows(viewer, **query).rows]

    assert found(metric="win", min_metric=1) == [0, 2]
    assert found(metric="moves", max_metric=2) == [1]
    assert found(metric='odd "$.name', min_metric=3) == [0]
    assert found(metric="win' OR 1", min_metric=0) == []
    assert found(sort="metric", sort_metric="moves") == [2, 1, 0]
    assert found(sort="metric", sort_metric="moves", descending=False) == [1, 2, 0]
    assert rows(viewer, metric="win", min_metric=1).total == 2


def test_a_row_has_the_rewards_of_its_group(logged: Viewer) -> None:
    listed = rows(logged, step=2, sort="reward", limit=1000).rows
    assert {(row.group, *(row.group_rewards or [])) for row in listed} == {
        (0, 2.0, 2.1, 2.2, 2.3),
        (1, 2.0, 2.1, 2.2, 2.3),
    }
    assert rows(logged, step=3, split="val").rows[0].group_rewards == [0.5, None]


@pytest.mark.parametrize("key", ["reward", "advantage", "tokens", "turns", "step", "started_at", "duration"])
@pytest.mark.parametrize("descending", [True, False])
def test_order_with_missing_values_last(logged: Viewer, key: str, descending: bool) -> None:
    field = {"tokens": "num_tokens", "turns": "num_turns", "duration": "duration_s"}.get(key, key)
    listed = rows(logged, sort=key, descending=descending, limit=1000)
    values = [getattr(row, field) for row in listed.rows]
    known = [value for value in values if value is not None]
    assert listed.total == len(values) == 26
    assert known == sorted(known, reverse=descending)
    assert values[: len(known)] == known


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({"step": "3"}, 10),
        ({"step": 3, "split": "val"}, 2),
        ({"split": "train", "group": 1}, 12),
        ({"step": 1, "group": 0}, 4),
        ({"outcome": "infra_fault"}, 1),
        ({"min_reward": "2.15", "max_reward": 3.05}, 6),
        ({"scenario": "s1", "split": "train"}, 12),
        ({"stop": "length"}, 0),
        ({"step": 77}, 0),
        ({"dropped": "any"}, 0),
    ],
)
def test_filters(logged: Viewer, query: dict[str, object], count: int) -> None:
    listed = rows(logged, **query)
    assert listed.total == len(listed.rows) == count


def test_search_finds_words_phrases_and_beginnings(viewer: Viewer, data_dir: DataDir) -> None:
    said = ["The refund was late.", "No refund for you", "INVOICE 12 paid", "übergrößen are here", "東京の天気は晴れ"]
    log(data_dir, [TrajectoryGroup([rollout(float(i), text) for i, text in enumerate(said)])], step=1)

    def hits(text: str) -> list[int]:
        return sorted(row.index for row in rows(viewer, text=text).rows)

    assert hits("refund") == [0, 1]
    assert hits("refund late") == [0]
    assert hits('"no refund"') == [1]
    assert hits('"refund no"') == []
    assert hits("invoi*") == [2]
    assert hits("invoi") == []
    assert hits("ubergroßen") == [3]
    assert hits("天気") == [4]
    assert hits("capital") == [0, 1, 2, 3, 4], "what the user said counts too"
    (row,) = rows(viewer, text='"no refund"').rows
    assert row.snippet is not None
    assert row.snippet.text[row.snippet.start : row.snippet.end] == "No refund"


@pytest.mark.parametrize(
    "text",
    ['"', "*", '" OR 1=1 --', "refund OR", "NEAR(a b)", "text : refund", "^refund", "a" * 1000, "(((", "-", "{", "\0"],
)
def test_no_search_is_syntax(logged: Viewer, text: str) -> None:
    assert rows(logged, text=text).total in (0, 26)


@pytest.mark.parametrize("key", ["reward", "step", "turns"])
def test_the_pages_of_a_search_are_parts_of_one_order(logged: Viewer, key: str) -> None:
    query = {"text": "capital", "sort": key, "split": "train", "min_reward": 1.1}
    whole = rows(logged, **query, limit=1000)
    assert whole.total == 22
    for offset in range(0, 26, 5):
        page = logged.rollouts(*RUN, RolloutTableQuery.model_validate({**query, "offset": offset, "limit": 5}))
        assert page.rows == whole.rows[offset : offset + 5]
        assert (page.total, page.is_total_exact) == (22, True)


def test_the_filters_have_the_values_that_occur(logged: Viewer) -> None:
    assert rows(logged, limit=1).stops == ["stop"]


def test_match_query_quotes_everything() -> None:
    assert match_query('late "no refund" invoi* OR "') == '"late" AND "no refund" AND "invoi"* AND "OR"'
    assert match_query("... * ?") is None


def test_find_in_prefers_the_earliest_match() -> None:
    assert find_in("one two three", "three two") == (4, 7)
    assert find_in("nothing here", "absent") is None
