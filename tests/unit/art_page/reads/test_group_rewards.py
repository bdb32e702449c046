"""The rewards of a rollout's group in its row of the table."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from art_page.databases import IndexStore
from art_page.rollouts import MOST_SHOWN, read_group_rewards


def insert(db: sqlite3.Connection, file: int, group: int, rewards: list[float | None]) -> None:
    db.executemany(
        "INSERT INTO rollouts (run, file, split, step, grp, idx, place, length, scenario_key, reward, num_turns, outcome)"
        " VALUES (1, ?, 'train', 1, ?, ?, 0, 1, 0, ?, 1, 'ok')",
        [(file, group, index, reward) for index, reward in enumerate(rewards)],
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[IndexStore]:
    store = IndexStore(tmp_path / "index.db")
    yield store
    store.close()


def test_each_group_has_its_own_rewards_by_index_with_null_for_none(store: IndexStore) -> None:
    store.write(lambda db: insert(db, 1, 0, [0.5, None, 1.0]))
    store.write(lambda db: insert(db, 1, 1, [0.0]))
    store.write(lambda db: insert(db, 2, 0, [9.0]))
    rewards = read_group_rewards(store, [(1, 0), (1, 0), (2, 0)])
    assert rewards == {(1, 0): [0.5, None, 1.0], (2, 0): [9.0]}
    assert read_group_rewards(store, []) == {}


def test_a_large_group_has_its_first_rewards(store: IndexStore) -> None:
    store.write(lambda db: insert(db, 1, 0, [float(i) for i in range(MOST_SHOWN + 5)]))
    assert read_group_rewards(store, [(1, 0)]) == {(1, 0): [float(i) for i in range(MOST_SHOWN)]}
