"""The trainer without a server, by the command of the documentation."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from art.storage import checkpoints

ROOT = Path(__file__).parents[2]
LINES = ["respond with yes or no", "say yes, no or maybe", "yes or maybe?", "no", "maybe, or maybe no"]


def run(command: list[str], directory: Path) -> list[float]:
    """The losses that it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]


@pytest.mark.slow
def test_the_documented_command_trains_in_two_processes_as_in_one(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(LINES))
    page = (ROOT / "docs/multi_gpu.md").read_text()
    (documented,) = re.findall(r"^    (torchrun .*)$", page, re.MULTILINE)
    program = "examples/standalone_trainer/train.py"
    words = [
        {"MODEL": str(tiny_model), program: str(ROOT / program)}.get(word, word) for word in shlex.split(documented)
    ]
    assert words[0] == "torchrun"
    two = run([sys.executable, "-m", "torch.distributed.run", *words[1:]], tmp_path)
    one = run([sys.executable, str(ROOT / program), str(tiny_model), "lines.txt", "alone"], tmp_path)
    assert len(one) == 3
    assert one == pytest.approx(two, rel=1e-3)
    assert one[-1] < one[0]
    assert checkpoints.list_steps(tmp_path / "checkpoints") == [0, 1, 2, 3]
    found, expected = (
        load_file(tmp_path / name / "0003" / checkpoints.ADAPTER_WEIGHTS) for name in ("checkpoints", "alone")
    )
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-2, abs=1e-4), name
