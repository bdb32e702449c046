"""Rows of any text and number come back as they were."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

from art.storage.jsonl import append_lines, read_lines


def test_half_of_a_surrogate_pair_is_kept(tmp_path: Path) -> None:
    rows = [{"said": "caf\u00e9 \ud83d"}, {"said": "whole \U0001f600", "reward": math.nan}]
    append_lines(tmp_path / "rows.jsonl", rows)
    assert [row for _, row in read_lines(tmp_path / "rows.jsonl")] == [
        rows[0],
        {"said": "whole \U0001f600", "reward": None},
    ]


_WRITER = """
import sys
from pathlib import Path
from art.storage.jsonl import append_lines
for number in range(400):
    append_lines(Path(sys.argv[1]), [{"writer": sys.argv[2], "number": number}])
"""


def test_two_processes_that_append_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, path, name]) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    rows = Counter((row["writer"], row["number"]) for _, row in read_lines(path) if row is not None)
    assert rows == Counter((name, number) for name in "ab" for number in range(400))
