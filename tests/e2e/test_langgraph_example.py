"""The LangGraph example learns: its tiny model, its script, held-out tickets before and after."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("langgraph", reason="needs the extra langgraph")

EXAMPLE = Path(__file__).parents[2] / "examples" / "langgraph"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns(seed: int, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")])}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run("-m", "art.cli.main", "tiny-model", "tiny", "--task", "warm_up:Support", "--seed", str(seed))
    printed = run(str(EXAMPLE / "train.py"), "tiny", "--seed", str(seed))
    before, after = (float(share) for share in re.findall(r"([\d.]+)% of held-out tickets right", printed))
    # 150 tickets: two standard errors of a difference are about 11 points.
    assert after > before + 12, printed
