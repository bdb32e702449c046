"""`model.log(..., row_id=...)` logs once, whenever the process is killed in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import ConfigError
from art.storage import jsonl
from art.storage.layout import DataDir
from tests.support.journals import group

ROW = "step-00000004"


class Killed(BaseException):
    """The process ends here."""


def fresh_model(folder: Path) -> art.Model[Any]:
    return art.Model(project="p", name="m", base_path=str(folder), report_metrics=[])


async def log(folder: Path) -> None:
    """What a script does at the end of a step, with a model as a new process makes it."""
    groups = [group(number) for number in range(3)]
    groups[0].trajectories[0].metrics["costs/judge/x"] = 0.25
    await fresh_model(folder).log(
        groups, split="train", metrics={"time/step_trainer_s": 2.0, "costs/gpu": 0.5}, step=4, row_id=ROW
    )


def read(folder: Path) -> dict[str, Any]:
    """Everything that is logged, without the times."""
    paths = DataDir(folder).model("p", "m")
    rows = [json.loads(line) for line in paths.history.read_text().splitlines()]
    lines = [json.loads(line) for line in paths.totals.read_text().splitlines()]
    return {
        "rows": [
            {name: row[name] for name in row if name not in ("recorded_at", "time/wall_clock_sec")} for row in rows
        ],
        "groups": sorted(paths.trajectories("train", 4).read_text().splitlines()),
        "scenarios": {one for line in lines for one in line["scenarios"]},
        "costs": {source: amount.usd for source, amount in fresh_model(folder).costs.totals().items()},
    }


async def test_a_kill_at_any_write_leaves_what_an_undisturbed_call_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await log(tmp_path / "calm")
    expected = read(tmp_path / "calm")
    assert len(expected["rows"]) == 1
    assert {source: usd for source, usd in expected["costs"].items() if usd} == {"gpu": 0.5, "train/judge/x": 0.25}
    real, left = jsonl.os.fsync, 0

    def fsync(file: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        real(file)

    kills = 0
    while True:
        folder, left = tmp_path / str(kills), kills
        monkeypatch.setattr(jsonl.os, "fsync", fsync)
        try:
            await log(folder)
        except Killed:
            kills += 1
        else:
            break
        monkeypatch.setattr(jsonl.os, "fsync", real)
        await log(folder)
        await log(folder)
        assert read(folder) == expected, f"killed at write {kills}"
    assert kills >= 5, "costs, their end, groups, scenarios and the row are written one after the other"


async def test_another_row_is_another_row(tmp_path: Path) -> None:
    model = fresh_model(tmp_path)
    for row_id in (ROW, "step-00000005", ROW, None, None):
        await model.log([group(0)], split="train", step=4, row_id=row_id)
    rows = [json.loads(line) for line in DataDir(tmp_path).model("p", "m").history.read_text().splitlines()]
    assert [row.get("row_id") for row in rows] == [ROW, "step-00000005", None, None]


async def test_a_name_that_the_server_would_refuse_is_refused_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="8 to 64 characters, got 'a'"):
        await fresh_model(tmp_path).log([group(0)], step=4, row_id="a")
