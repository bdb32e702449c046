"""A log that comes from elsewhere is kept once, wherever the sender or the server broke off."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from art.errors import InvalidRequestError
from art.runtime.model_checkpoints import append_once
from art.storage.jsonl import append_lines, encode
from art.storage.layout import ModelPaths

ROW = {"train/reward": 0.5, "step": 3, "recorded_at": "2026-01-31T10:00:00.123456+00:00", "lost": None, "n": 3}
GROUPS: list[dict[str, Any]] = [
    {"trajectories": [{"reward": i / 3, "text": "é <b> \u2028"}], "exceptions": []} for i in range(4)
]


@pytest.fixture
def paths(tmp_path: Path) -> ModelPaths:
    return ModelPaths(tmp_path)


def lines(path: Path) -> list[str]:
    return path.read_text().removesuffix("\n").split("\n") if path.exists() else []


def test_the_same_row_is_kept_once_and_further_parts_join_it(paths: ModelPaths) -> None:
    for groups in (GROUPS[:2], GROUPS[:2], GROUPS[2:], GROUPS):
        append_once(paths, "train", 3, ROW, groups)
    assert lines(paths.history) == [encode(ROW)]
    assert lines(paths.trajectories("train", 3)) == [encode(group) for group in GROUPS]


def test_logging_the_same_groups_again_is_another_row(paths: ModelPaths) -> None:
    append_once(paths, "val", 3, ROW, GROUPS[:1])
    append_once(paths, "val", 3, ROW | {"recorded_at": "2026-01-31T10:00:01+00:00"}, GROUPS[:1])
    assert len(lines(paths.history)) == 2
    assert lines(paths.trajectories("val", 3)) == [encode(GROUPS[0])] * 2


@pytest.mark.parametrize("file", ["history", "trajectories"])
@pytest.mark.parametrize("cut", [1, 2, 10, 60, 10_000])
def test_a_crash_at_any_byte_is_made_good_by_sending_again(paths: ModelPaths, cut: int, file: str) -> None:
    earlier = {"train/reward": 0.1, "step": 2, "recorded_at": "earlier"}, [{"trajectories": [], "exceptions": ["x"]}]
    trajectories = paths.trajectories("train", 3)
    append_once(paths, "train", 3, *earlier)
    written = trajectories if file == "trajectories" else paths.history
    before = trajectories.read_bytes(), written.stat().st_size
    append_once(paths, "train", 3, ROW, GROUPS)
    expected = lines(paths.history), lines(trajectories)
    if file == "history":  # it is written first
        trajectories.write_bytes(before[0])
    os.truncate(written, max(before[1], written.stat().st_size - cut))
    append_once(paths, "train", 3, ROW, GROUPS)
    assert (lines(paths.history), lines(trajectories)) == expected


def test_a_script_that_writes_into_the_same_directory_is_not_repeated(paths: ModelPaths) -> None:
    append_lines(paths.trajectories("train", 3), GROUPS)
    append_lines(paths.history, [ROW])
    append_once(paths, "train", 3, ROW, GROUPS)
    assert (len(lines(paths.history)), len(lines(paths.trajectories("train", 3)))) == (1, 4)


def test_no_split_leaves_the_folder(paths: ModelPaths) -> None:
    for split, step in itertools.product(("..", "a/b", "", "/etc"), (0, 1)):
        with pytest.raises(InvalidRequestError):
            append_once(paths, split, step, ROW, GROUPS)
    assert not paths.history.exists()
