"""Which path a token path of a rollout leaves, where, and why."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from art.record.recorded_answers import RecordedAnswer
from art.storage.database import Database
from art_page.databases import ReadOnlyDatabase
from art_page.token_paths import PathBranch, join_paths, read_branch_reasons


def answer(exchange_id: str, prompt: str, completion: str) -> RecordedAnswer:
    """An answer whose tokens are the characters of two texts."""
    as_ids = [np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32) for text in (prompt, completion)]
    return RecordedAnswer(
        id=exchange_id, project="p", name="n", policy_version=1, prompt_token_ids=as_ids[0],
        completion_token_ids=as_ids[1], sampling_logprobs=np.zeros(len(completion)), temperature=1.0, top_p=1.0,
        finish_reason="stop", has_tools=False,
    )  # fmt: skip


def paths_of(*histories: list[RecordedAnswer]) -> list[PathBranch | None]:
    recorded = {one.id: one for history in histories for one in history}
    joined = join_paths([[one.id for one in history] for history in histories], recorded, {"c": "reasoning_dropped"})
    return [path.branch for path in joined]


def test_answers_that_continue_one_another_are_one_path_without_a_branch() -> None:
    assert paths_of([answer("a", "sys", "one"), answer("b", "sysonetool", "two")]) == [None]


def test_a_branch_names_the_path_that_it_shares_most_with_the_place_and_the_reason() -> None:
    first, second = answer("a", "sys", "think one"), answer("b", "sysone", "two")
    third = answer("c", "sysonetwothree", "x")  # continues b
    assert paths_of([first, second, third]) == [None, PathBranch(0, 3, None)]
    left = answer("c", "sysone!", "x")
    assert paths_of([first, second, left]) == [None, PathBranch(0, 3, None), PathBranch(1, 6, "reasoning_dropped")]


def test_a_further_conversation_leaves_no_path() -> None:
    assert paths_of([answer("a", "sys", "one")], [answer("b", "sys2", "two")]) == [None, None]


def test_reasons_are_read_from_the_record_and_are_none_where_there_is_no_record(tmp_path: Path) -> None:
    database = Database(tmp_path / "art.db")
    database.run_blocking(lambda db: db.execute("CREATE TABLE exchanges (id TEXT, branch_reason TEXT)"))
    database.run_blocking(lambda db: db.execute("INSERT INTO exchanges VALUES ('a', NULL), ('b', 'tools_changed')"))
    assert read_branch_reasons(ReadOnlyDatabase(tmp_path / "art.db"), ["a", "b"]) == {"b": "tools_changed"}
    assert read_branch_reasons(ReadOnlyDatabase(tmp_path / "none.db"), ["a"]) == {}
