"""A script that is killed at any write of its journal, and started again, trains and logs what an undisturbed one does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.support.killed_pipelines import STEPS


def pipelines(folder: Path, **options: int) -> list[dict[str, Any]]:
    words = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.killed_pipelines", str(folder), *words],
        capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def rollouts(steps: list[list[list[Any]]]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(one) for one in chain(*steps))


def check(folder: Path, staleness: int, stride: int) -> None:
    calm, *killed = pipelines(folder, staleness=staleness, stride=stride)
    # Each of 8 groups writes its start, two rollouts and its scores; each of 4 steps its beginning and its end.
    assert calm["num_writes"] == 8 * 4 + STEPS * 2
    assert len(killed) == -(-calm["num_writes"] // stride)
    for one in killed:
        assert one["num_kills"] >= 1
        if staleness == 0:
            assert one["trained"] == calm["trained"], f"killed at write {one['at']}"
        assert rollouts(one["trained"]) == rollouts(calm["trained"]), f"killed at write {one['at']}"
        assert one["logged"] == calm["logged"] == sorted(map(list, rollouts(calm["trained"]).elements()))
        assert [step for step, _ in one["rows"]] == list(range(1, STEPS + 1))
        # What was running is run again, never what had ended: at most the rollouts of the groups that may be under way.
        assert one["num_run"] - calm["num_run"] <= one["num_kills"] * 2 * 2 * (1 + staleness)


def test_a_kill_at_some_writes_changes_nothing(tmp_path: Path) -> None:
    check(tmp_path, staleness=0, stride=11)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_kill_at_any_write_changes_nothing(tmp_path: Path, staleness: int) -> None:
    check(tmp_path, staleness=staleness, stride=1)
