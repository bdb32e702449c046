"""A small kill storm, and its checks on a run that was tampered with."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art.storage.layout import DataDir
from benchmarks import kill_storm
from benchmarks.report import Result, Spread
from benchmarks.storm_checks import check, read_record


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Iterator[kill_storm.Run]:
    run = kill_storm.Run(tmp_path, tiny_model)
    yield run
    for pid in run.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_run_survives_the_death_of_each_of_its_processes(
    run: kill_storm.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = list(kill_storm.VICTIMS)
    monkeypatch.setattr(kill_storm, "AT_ONCE_SHARE", 0.0)

    class InTurn(random.Random):
        def choices(self, *_: Any, **__: Any) -> list[Any]:
            return [remaining.pop()]

    kills, breaches = kill_storm.storm(run, len(remaining), InTurn(0), "")
    assert breaches == []
    assert [kill.victim for kill in kills] == list(kill_storm.VICTIMS)[::-1]
    assert run.finish() == 0
    assert run.left_of(list(run.processes())) == []
    record = read_record(run.record_path)
    found = check(run.data_dir, record)
    assert found.breaches == []
    assert found.counts["steps"] >= 8
    assert found.counts["answers"] >= 24 * found.counts["steps"]
    _tamper_and_check(run, record)


def _tamper_and_check(run: kill_storm.Run, record: list[dict[str, Any]]) -> None:
    """Each breach is found."""
    weights = DataDir(run.data_dir).model("storm", "agent").checkpoint(2) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    database = sqlite3.connect(DataDir(run.data_dir).database)
    first, second = [line["exchange"] for line in record if "exchange" in line][:2]
    database.execute("DELETE FROM exchanges WHERE id = ?", (first,))
    database.execute("UPDATE exchanges SET message = ? WHERE id = ?", (json.dumps({"content": "other"}), second))
    database.execute("UPDATE jobs SET status = json_set(status, '$.state', 'running') WHERE rowid = 3")
    database.commit()
    database.close()
    record.append({"error": "APIConnectionError", "message": "Connection error.", "during": "a rollout"})
    breaches = "\n".join(check(run.data_dir, record).breaches)
    for breach in (
        f"the answer {first} is lost",
        f"the answer {second} is stored with another text",
        "steps that succeeded are",
        "1 jobs were not finished",
        "adapter_model.safetensors has",
        "names no cause: APIConnectionError",
    ):
        assert breach in breaches


def test_the_plot_shows_what_was_killed(tmp_path: Path) -> None:
    times = {"server": Spread(2.0, 1.0, 5.0), "engine": Spread(3.0, 3.0, 3.0), "trainer": "-"}
    rows = [{"killed": name, "times": 3, "recovered s": time} for name, time in times.items()]
    figure = kill_storm.draw(Result(summary="9 kills", rows=rows))  # type: ignore[arg-type]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["engine (3 times)", "server (3 times)"]
