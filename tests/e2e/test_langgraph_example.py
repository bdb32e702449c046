"""The LangGraph example: its tiny model, its script, held-out tickets before and after; and that it learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("langgraph", reason="needs the extra langgraph")

EXAMPLE = Path(__file__).parents[2] / "examples" / "langgraph"


def run(folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_its_short_form(tmp_path: Path) -> None:
    """With a warm start that is too short to answer well."""
    run(tmp_path, "-m", "art.cli.main", "tiny-model", "tiny", "--task", "warm_up:Support", "--warm-start-steps", "60")
    small = ["--steps", "1", "--tickets", "2", "--rollouts", "4", "--tests", "4"]
    printed = run(tmp_path, str(EXAMPLE / "train.py"), "tiny", *small)
    assert len(re.findall(r"[\d.]+% of held-out tickets right", printed)) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns(seed: int, tmp_path: Path) -> None:
    run(tmp_path, "-m", "art.cli.main", "tiny-model", "tiny", "--task", "warm_up:Support", "--seed", str(seed))
    printed = run(tmp_path, str(EXAMPLE / "train.py"), "tiny", "--seed", str(seed))
    before, after = (float(share) for share in re.findall(r"([\d.]+)% of held-out tickets right", printed))
    # 150 tickets: two standard errors of a difference are about 11 points.
    assert after > before + 12, printed
