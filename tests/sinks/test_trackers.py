"""Each tracker with its real library, offline: what a user sees after a run, a killed run and a resumed run.

`make test-sinks` installs the libraries into an environment of their own. A tracker that is not installed is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from art.metrics.delivery import is_installed, load_tracker
from tests.sinks.readers import READERS, Seen, environment, model_folder

PROGRAM = Path(__file__).with_name("program.py")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=sorted(READERS))
def tracker(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not is_installed(load_tracker(name)):
        pytest.skip(f"{name} is not installed; `make test-sinks` installs it")
    return name


def run(folder: Path, tracker: str, first: int, last: int, end: str = "close") -> str:
    command = [sys.executable, str(PROGRAM), str(folder), tracker, str(first), str(last), end]
    done = subprocess.run(
        command, env=os.environ | environment(folder), cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == (-9 if end == "kill" else 0), done.stderr
    return done.stderr


def check(seen: Seen, num_steps: int) -> None:
    """One point per step and metric in one run, whatever happened in between."""
    steps = range(num_steps)
    assert seen.num_runs == 1
    for metric, of in {
        "train/reward": lambda step: 0.5,
        "loss/train": lambda step: 1 / (step + 1),
        "val/reward": lambda step: step / 10,
        "throughput/train_tokens_per_s": lambda step: 100.0,
        "costs/train/search": lambda step: 0.01,
        "time/cum/actor_s": lambda step: 2.0 * (step + 1),
        "data/cum/num_trajectories": lambda step: 5.0 * (step + 1),
    }.items():
        expected = [(step, pytest.approx(of(step), rel=1e-6)) for step in steps]
        assert sorted(seen.curves[metric]) == expected, metric
    if seen.histograms is not None:
        counts = [2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 2.0]
        assert seen.histograms == dict.fromkeys(steps, counts)
        assert "data/reward_hist/0" not in seen.curves
    if seen.config is not None:
        assert "turns" in seen.config
        assert "hidden-key" not in seen.config


def test_a_run_and_its_continuation_are_one_line(tmp_path: Path, tracker: str) -> None:
    run(tmp_path, tracker, 0, 2)
    check(READERS[tracker](tmp_path), 2)
    run(tmp_path, tracker, 2, 3)
    check(READERS[tracker](tmp_path), 3)


def test_a_killed_run_and_its_continuation_are_one_line(tmp_path: Path, tracker: str) -> None:
    run(tmp_path, tracker, 0, 3, "kill")
    run(tmp_path, tracker, 3, 4, "kill")
    run(tmp_path, tracker, 4, 5)
    check(READERS[tracker](tmp_path), 5)


def test_killed_between_the_tracker_and_the_cursor(tmp_path: Path, tracker: str) -> None:
    run(tmp_path, tracker, 0, 1)
    cursor = model_folder(tmp_path) / "sinks" / f"{tracker}.jsonl"
    before = cursor.read_bytes()
    run(tmp_path, tracker, 1, 3)
    cursor.write_bytes(before)
    run(tmp_path, tracker, 3, 4)
    check(READERS[tracker](tmp_path), 4)


def test_a_program_that_does_not_close_its_model(tmp_path: Path, tracker: str) -> None:
    run(tmp_path, tracker, 0, 2, "exit")
    run(tmp_path, tracker, 2, 3)
    check(READERS[tracker](tmp_path), 3)
