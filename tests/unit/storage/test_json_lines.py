"""Rows of any text and number come back as they were."""

from __future__ import annotations

import math
from pathlib import Path

from art.storage.jsonl import append_lines, read_lines


def test_half_of_a_surrogate_pair_is_kept(tmp_path: Path) -> None:
    rows = [{"said": "caf\u00e9 \ud83d"}, {"said": "whole \U0001f600", "reward": math.nan}]
    append_lines(tmp_path / "rows.jsonl", rows)
    assert [row for _, row in read_lines(tmp_path / "rows.jsonl")] == [
        rows[0],
        {"said": "whole \U0001f600", "reward": None},
    ]
