"""A notebook in its short form, cell by cell in one event loop, as Jupyter runs it."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

import art
from tests.support.notebooks import FOLDER, run_cells
from tests.support.shared_server import on

pytest.importorskip("matplotlib").use("Agg")


async def test_the_quick_start(
    tiny_model: Path, shared_backend: art.LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opened = on(shared_backend)
    monkeypatch.setattr(art, "LocalBackend", opened)
    names = await run_cells(FOLDER / "quick_start.py", {"BASE_MODEL": str(tiny_model), "STEPS": 2})
    assert names["rewards"].keys() == {1, 2}
    assert 0.5 < statistics.fmean(names["rewards_before"]) < 1
    assert all(isinstance(answer, art.Trajectory) for answer in names["after"])
    assert isinstance(names["BACKEND"], opened)
    assert names["BACKEND"]._client is None, "the last cell of code closes it"
