"""Adds to the rows of the table what the other rollouts of their group got."""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from art.viewer.index.store import IndexStore

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
