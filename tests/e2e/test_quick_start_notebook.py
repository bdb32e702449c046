"""A notebook in its short form, cell by cell in one event loop, as Jupyter runs it."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

import art
from tests.support.notebooks import FOLDER, run_cells

pytest.importorskip("matplotlib").use("Agg")


async def test_the_quick_start(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = await run_cells(FOLDER / "quick_start.py", {"BASE_MODEL": str(tiny_model), "STEPS": 2})
    assert names["rewards"].keys() == {1, 2}
    assert 0.5 < statistics.fmean(names["rewards_before"]) < 1
    assert all(isinstance(answer, art.Trajectory) for answer in names["after"])
    assert names["BACKEND"].server_pid is None, "the last cell of code stops the server"
