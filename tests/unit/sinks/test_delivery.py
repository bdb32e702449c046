"""Delivery to sinks: order, retries, resuming, losses. The tracker is a fake; the log and the threads are real."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import ConfigError
from art.metrics import delivery
from art.storage.layout import ModelPaths
from tests.support.fake_tracker import FakeTracker
from tests.support.model_folder import paths_of


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "POLL_S": 0.05,
        "FIRST_PAUSE_S": 0.01,
        "LONGEST_PAUSE_S": 0.05,
        "CLOSING_PAUSE_S": 0.01,
    }.items():
        monkeypatch.setattr(delivery, name, seconds)
    monkeypatch.setattr(delivery, "CLOSE_FAILING_S", 0.2)


@pytest.fixture
def tracker() -> FakeTracker:
    return FakeTracker()


def make_model(folder: Path, *trackers: FakeTracker, name: str = "agent") -> art.Model:
    return art.Model(
        name=name, project="games", base_path=str(folder), report_metrics=[one.sink for one in trackers]
    )  # fmt: skip


def group(*rewards: float, text: str = "x") -> art.TrajectoryGroup:
    messages: Any = [{"role": "user", "content": text}]
    return art.TrajectoryGroup([art.Trajectory(messages_and_choices=messages, reward=reward) for reward in rewards])


# --- what arrives ---


async def test_rows_and_groups_arrive_in_the_order_of_the_log(tmp_path: Path, tracker: FakeTracker) -> None:
    model = make_model(tmp_path, tracker)
    await model.log([group(0.0, 1.0), group(1.0, 1.0)], split="train", metrics={"loss/train": 0.5}, step=1)
    await model.log([group(1.0)], split="val", step=1)
    await model.log(metrics={"x": float("nan"), "y": 2}, split="train", step=2)
    await model.close()
    assert [(row.number, row.step) for row in tracker.rows] == [(0, 1), (1, 1), (2, 2)]
    assert tracker.points("train/reward") == [(1, 0.75)]
    assert tracker.points("val/reward") == [(1, 1.0)]
    assert "train/x" not in tracker.rows[2].metrics
    assert tracker.rows[2].metrics["train/y"] == 2
    assert not {"step", "training_step", "recorded_at"} & tracker.rows[0].metrics.keys()
    assert [(one.split, one.step, one.first, len(one.groups)) for one in tracker.groups] == [
        ("train", 1, 0, 2), ("val", 1, 0, 1),
    ]  # fmt: skip
    assert [trajectory.reward for trajectory in tracker.groups[0].groups[0]] == [0.0, 1.0]
    assert tracker.num_closed == 1
    assert tracker.threads == {"art-sink-fake"}


async def test_settings_that_are_recorded_later_arrive_before_the_next_row(
    tmp_path: Path, tracker: FakeTracker
) -> None:
    model = make_model(tmp_path, tracker)
    await model.log(metrics={"x": 1.0}, step=1)
    await model.record_settings({"training": {"learning_rate": 1e-4}, "data": {"api_key": "hidden-key-123"}})
    await model.record_settings({"training": {"learning_rate": 1e-4}})
    await model.log(metrics={"x": 2.0}, step=2)
    await model.close()
    (config,) = tracker.configs
    assert config["training"] == {"learning_rate": 1e-4}
    assert "hidden-key-123" not in json.dumps(config)
    assert "training" not in tracker.runs[0].config
    written = json.loads(paths_of(model).settings.read_text())
    assert written == {"training": {"learning_rate": 1e-4}, "data": {"api_key": "[redacted]"}}


async def test_sinks_start_one_after_the_other(tmp_path: Path) -> None:
    """Trackers' libraries import the same packages, and not all of them can be imported by several threads at once."""
    trackers = [FakeTracker(f"fake{number}") for number in range(3)]
    starting = threading.Lock()
    overlaps: list[bool] = []

    def start() -> None:
        overlaps.append(not starting.acquire(blocking=False))
        time.sleep(0.01)
        starting.release()

    for one in trackers:
        one.starting = start
    model = make_model(tmp_path, *trackers)
    await model.log(metrics={"x": 1.0}, step=1)
    await model.close()
    assert [len(one.runs) for one in trackers] == [1, 1, 1]
    assert overlaps == [False] * 3


async def test_large_logs_come_in_pieces(tmp_path: Path, tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PIECE_BYTES", 2_000)
    model = make_model(tmp_path, tracker)
    await model.log([group(1.0, text="y" * 900) for _ in range(5)], split="train", step=1)
    await model.close()
    await model.log([group(1.0)], split="train", step=1)
    await model.close()
    assert [(one.first, len(one.groups)) for one in tracker.groups] == [(0, 2), (2, 2), (4, 1), (5, 1)]


async def test_two_trackers_and_two_models_do_not_mix(tmp_path: Path) -> None:
    one, other = FakeTracker("one"), FakeTracker("other")
    models = [make_model(tmp_path, one, other, name=name) for name in ("a", "b")]
    for model in models:
        await model.log(metrics={"x": 1.0}, step=1)
    await asyncio.gather(*(model.close() for model in models))
    for tracker in (one, other):
        assert sorted(run.name for run in tracker.runs) == ["a", "b"]
        assert len({run.id for run in tracker.runs}) == 2
        assert [row.number for row in tracker.rows] == [0, 0]


async def test_a_copy_of_a_model_has_the_same_log_and_a_renamed_one_its_own(
    tmp_path: Path, tracker: FakeTracker
) -> None:
    model = make_model(tmp_path, tracker)
    await model.log(metrics={"x": 1.0}, step=1)
    copy = model.model_copy(deep=True)
    await copy.log(metrics={"x": 2.0}, step=2)
    copy.name = "other"
    await copy.log(metrics={"x": 3.0}, step=3)
    await model.close()
    assert [run.name for run in tracker.runs] == ["agent", "other"]
    assert sorted(tracker.points("val/x")) == [(1, 1.0), (2, 2.0), (3, 3.0)]


async def test_the_run_is_described_without_secrets(tmp_path: Path, tracker: FakeTracker) -> None:
    model = make_model(tmp_path, tracker)
    model.config = {"turns": 3, "search_api_key": "abc", "urls": ["https://me:pass@host/x"], "obj": object()}
    await model.log(metrics={"x": 1.0})
    await model.close()
    config = tracker.runs[0].config
    assert config["config"]["turns"] == 3
    assert config["config"]["search_api_key"] == "[redacted]"
    assert config["config"]["urls"] == ["https://[redacted]@host/x"]


# --- failures ---


async def test_a_sink_that_cannot_start_fails_the_first_log(tmp_path: Path) -> None:
    good, bad = FakeTracker("good"), FakeTracker("bad")
    model = make_model(tmp_path, good, bad)
    for number, (error, says) in enumerate((
        (ConfigError("the key is wrong: set FAKE_KEY"), "set FAKE_KEY"),
        (OSError("read-only file system"), r"bad cannot start \(OSError: read-only.*leave it out of `report_metrics`"),
    ), start=1):  # fmt: skip
        bad.start_error = error
        with pytest.raises(ConfigError, match=says):
            await model.log(metrics={"x": 1.0})
        assert good.num_closed == number
    bad.start_error = None
    await model.log(metrics={"x": 1.0})
    await model.close()
    assert good.numbers() == bad.numbers() == [0]


async def test_a_failing_tracker_gets_everything_once_it_is_back(
    tmp_path: Path, tracker: FakeTracker, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(tmp_path, tracker)
    await model.log(metrics={"x": 0.0}, step=0)
    tracker.wait_for(1)
    tracker.error = OSError("no route to host")
    for step in range(1, 5):
        await model.log(metrics={"x": float(step)}, step=step)
        tracker.wait_for_calls(3)  # one that worked, one that failed, and one after the failure was noted
    tracker.error = None
    tracker.wait_for(5)
    await model.close()
    assert tracker.numbers() == [0, 1, 2, 3, 4]
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert ["no route to host" in warnings[0], "accepts metrics again" in warnings[-1]] == [True, True]
    assert len(warnings) == 2, "one warning per outage, not one per try"


async def test_what_is_left_at_the_end_is_counted_and_sent_by_the_next_run(
    tmp_path: Path, tracker: FakeTracker, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(tmp_path, tracker)
    tracker.error = OSError("down")
    for step in range(3):
        await model.log([group(1.0)], metrics={"x": 1.0}, step=step)
    tracker.wait_for_calls(2)  # the failure of the first call is noted
    await model.close()
    assert "fake did not get 3 rows (OSError: down)" in caplog.text
    assert "accepts metrics again" not in caplog.text
    assert tracker.rows == []
    tracker.error = None
    resumed = make_model(tmp_path, tracker)
    await resumed.log(metrics={"x": 1.0}, step=3)
    await resumed.close()
    assert [(row.number, row.step) for row in tracker.rows] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [one.step for one in tracker.groups] == [0, 1, 2]


async def test_refused_rows_are_skipped(tmp_path: Path, tracker: FakeTracker, caplog: pytest.LogCaptureFixture) -> None:
    tracker.refuses = lambda row: row.step == 1
    model = make_model(tmp_path, tracker)
    for step in range(3):
        await model.log(metrics={"x": 1.0}, step=step)
    tracker.wait_for(2)
    await model.log(metrics={"x": 1.0}, step=3)
    await model.close()
    assert tracker.numbers() == [0, 2, 3]
    assert "fake refused row 1 (step 1)" in caplog.text


async def test_damaged_lines_are_skipped(tmp_path: Path, tracker: FakeTracker) -> None:
    model = make_model(tmp_path, tracker)
    await model.log([group(1.0)], split="train", step=1)
    await model.close()
    paths = paths_of(model)
    with paths.history.open("a") as file:
        file.write("{damaged\n")
    with paths.trajectories("train", 1).open("a") as file:
        file.write('{"trajectories": 3}\n')
    await model.log([group(0.5)], split="train", step=1)
    tracker.wait_for(2)
    await model.log(metrics={"x": 1.0}, split="train", step=2)
    await model.close()
    assert tracker.numbers() == [0, 1, 2]
    assert [(one.first, len(one.groups)) for one in tracker.groups] == [(0, 1), (1, 1)]


async def test_training_does_not_wait_for_a_slow_tracker(tmp_path: Path, tracker: FakeTracker) -> None:
    tracker.answers.clear()
    model = make_model(tmp_path, tracker)
    for step in range(6):
        await model.log(metrics={"x": float(step)}, step=step)
    assert tracker.rows == [], "the tracker is still busy"
    tracker.answers.set()
    await model.close()
    assert tracker.numbers() == [0, 1, 2, 3, 4, 5]


async def test_a_tracker_that_hangs_does_not_hold_the_end(tmp_path: Path, tracker: FakeTracker) -> None:
    tracker.answers.clear()
    model = make_model(tmp_path, tracker)
    await model.log(metrics={"x": 0.0}, step=0)
    running = next(iter(model._sinks._by_folder.values()))
    assert running is not None
    await asyncio.to_thread(running.close, 0.1)
    assert tracker.rows == [], "it still hangs"
    tracker.answers.set()


# --- resuming ---


@pytest.mark.parametrize("counts_rows", [False, True])
async def test_a_resumed_run_continues(tmp_path: Path, counts_rows: bool) -> None:
    tracker = FakeTracker(counts_rows=counts_rows)
    for step in range(4):
        model = make_model(tmp_path, tracker)
        await model.log([group(1.0)], metrics={"x": 1.0}, step=step)
        await model.close()
    assert [(row.number, row.step) for row in tracker.rows] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [one.step for one in tracker.groups] == [0, 1, 2, 3]
    assert len({run.id for run in tracker.runs}) == 1


async def test_a_tracker_added_later_gets_the_whole_history(tmp_path: Path, tracker: FakeTracker) -> None:
    model = make_model(tmp_path)
    for step in range(3):
        await model.log([group(1.0)], metrics={"x": 1.0}, step=step)
    model = make_model(tmp_path, tracker)
    await model.log(metrics={"x": 1.0}, step=3)
    await model.close()
    assert [row.step for row in tracker.rows] == [0, 1, 2, 3]
    assert len(tracker.groups) == 3


async def test_a_row_whose_answer_got_lost_is_not_repeated_if_the_tracker_counts(tmp_path: Path) -> None:
    tracker = FakeTracker(counts_rows=True)
    model = make_model(tmp_path, tracker)
    await model.log(metrics={"x": 0.0}, step=0)
    await model.close()
    cursor = ModelPaths(paths_of(model).root).sinks / "fake.jsonl"
    before = cursor.read_bytes()
    model = make_model(tmp_path, tracker)
    await model.log(metrics={"x": 1.0}, step=1)
    await model.close()
    cursor.write_bytes(before)  # killed after the tracker accepted row 1, before the cursor was written
    model = make_model(tmp_path, tracker)
    await model.log(metrics={"x": 2.0}, step=2)
    await model.close()
    assert tracker.points("val/x") == [(0, 0.0), (1, 1.0), (2, 2.0)]


async def test_rows_that_the_tracker_lost_are_sent_again(tmp_path: Path) -> None:
    tracker = FakeTracker(counts_rows=True)
    model = make_model(tmp_path, tracker)
    for step in range(4):
        await model.log([group(1.0)], step=step)
    await model.close()
    del tracker.rows[2:], tracker.groups[2:]
    model = make_model(tmp_path, tracker)
    await model.log([group(1.0)], step=4)
    await model.close()
    assert [(row.number, row.step) for row in tracker.rows] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert [one.step for one in tracker.groups] == [0, 1, 2, 3, 4], "the groups of a row come again with it"


async def test_a_run_whose_log_was_lost_continues_with_new_numbers(tmp_path: Path) -> None:
    tracker = FakeTracker(counts_rows=True)
    for folder, steps in (("first", (0, 1)), ("second", (2, 3)), ("second", (4,))):
        model = make_model(tmp_path / folder, tracker)
        for step in steps:
            await model.log(metrics={"x": 0.0}, step=step)
        await model.close()
    assert [(row.number, row.step) for row in tracker.rows] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]


async def test_a_log_that_began_again_is_sent_from_its_start(tmp_path: Path, tracker: FakeTracker) -> None:
    model = make_model(tmp_path, tracker)
    for step in range(3):
        await model.log(metrics={"x": 0.0}, step=step)
    await model.close()
    paths_of(model).history.unlink()
    model = make_model(tmp_path, tracker)
    await model.log(metrics={"x": 1.0}, step=0)
    await model.close()
    assert tracker.numbers() == [0, 1, 2, 3]
    assert tracker.rows[-1].metrics["val/x"] == 1.0


KILLED = """
import asyncio, os, sys
from pathlib import Path
import art
from art.sinks import Row, Run, Sink

class OnDisk(Sink):
    name = "disk"

    def start(self, run: Run) -> int | None:
        self.file = open({tracker!r}, "a+b", buffering=0)
        self.file.seek(0)
        return len(self.file.readlines()) if {counts} else None

    def metrics(self, row: Row) -> None:
        self.file.write(f"{{row.number}} {{row.step}}\\n".encode())
        if row.step == {dies_at}:
            os.kill(os.getpid(), 9)

async def main():
    model = art.Model(name="a", project="p", base_path={folder!r}, report_metrics=[OnDisk])
    for step in range({first}, {end}):
        await model.log(metrics={{"x": 1.0}}, step=step)
    await model.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("counts", [True, False])
def test_killed_between_sent_and_saved(tmp_path: Path, counts: bool) -> None:
    tracker = tmp_path / "tracker.txt"
    first, end = 0, 10
    for dies_at in (4, -1):
        values = {
            "tracker": str(tracker),
            "counts": counts,
            "folder": str(tmp_path),
            "dies_at": dies_at,
            "first": first,
            "end": end,
        }
        done = subprocess.run([sys.executable, "-c", KILLED.format(**values)], timeout=60, capture_output=True)
        assert (done.returncode == 0) == (dies_at < 0), done.stderr
        log = (tmp_path / "p" / "models" / "a" / "history.jsonl").read_text().splitlines()
        first = json.loads(log[-1])["step"] + 1
        end = max(end, first + 1)  # the killed process may have logged all of its steps: the next run logs one more
    sent = tracker.read_text().splitlines()
    assert list(dict.fromkeys(sent)) == [f"{step} {step}" for step in range(first)]
    assert len(sent) == (first if counts else first + 1), (
        "without a count, the one row whose fate is unknown comes twice"
    )


async def test_one_of_two_models_with_the_same_log_delivers(tmp_path: Path, tracker: FakeTracker) -> None:
    one, other = make_model(tmp_path, tracker), make_model(tmp_path, tracker)
    await one.log(metrics={"x": 1.0}, step=1)
    await other.log(metrics={"x": 2.0}, step=2)
    await one.log(metrics={"x": 3.0}, step=3)
    await one.close()
    await other.log(metrics={"x": 4.0}, step=4)
    tracker.wait_for(4)
    await other.close()
    assert tracker.numbers() == [0, 1, 2, 3]
    assert len(tracker.runs) == 2, "the second starts when the first has ended"


def test_a_script_that_does_not_close_delivers_at_its_end(tmp_path: Path) -> None:
    tracker = tmp_path / "tracker.txt"
    values = {"tracker": str(tracker), "counts": False, "folder": str(tmp_path), "dies_at": -1, "first": 0, "end": 10}
    script = KILLED.format(**values).replace("    await model.close()\n", "")
    script = script.replace("        if row.step ==", "        import time; time.sleep(0.05)\n        if row.step ==")
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
    assert len(tracker.read_text().splitlines()) == 10
