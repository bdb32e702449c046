"""The trainer without a server, by the command of the documentation."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(
    ("device", "tolerance"),
    [
        pytest.param("cpu", 1e-3, marks=pytest.mark.slow),
        pytest.param("cuda", 3e-2, marks=[pytest.mark.gpu, TWO_GPUS]),  # bfloat16
    ],
)
def test_the_documented_command_trains_in_two_processes_as_in_one(
    device: str, tolerance: float, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(LINES))
    page = (ROOT / "docs/extending.md").read_text()
    (documented,) = re.findall(r"^    (torchrun .*)$", page, re.MULTILINE)
    program = "examples/standalone_trainer/train.py"
    words = [
        {"MODEL": str(tiny_model), program: str(ROOT / program)}.get(word, word) for word in shlex.split(documented)
    ]
    assert words[0] == "torchrun"
    two = run([sys.executable, "-m", "torch.distributed.run", *words[1:], "--device", device], tmp_path)
    one = run(
        [sys.executable, str(ROOT / program), str(tiny_model), "lines.txt", "alone", "--device", device], tmp_path
    )
    assert len(one) == 3
    assert one == pytest.approx(two, rel=tolerance)
    assert one[-1] < one[0]
    assert checkpoints.list_steps(tmp_path / "checkpoints") == [0, 1, 2, 3]
    found, expected = (
        load_file(tmp_path / name / "0003" / checkpoints.ADAPTER_WEIGHTS) for name in ("checkpoints", "alone")
    )
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=10 * tolerance, abs=tolerance / 10), name


def test_in_one_process_it_learns_and_goes_on_where_it_stopped(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(LINES))
    program = str(ROOT / "examples/standalone_trainer/train.py")

    def train(steps: str) -> list[float]:
        arguments = [str(tiny_model), str(tmp_path / "lines.txt"), str(tmp_path / "out"), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", [program, *arguments, "--steps", steps])
        runpy.run_path(program, run_name="__main__")
        return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", capsys.readouterr().out, re.MULTILINE)]

    first = train("2")
    kept = (tmp_path / "out/0002" / checkpoints.ADAPTER_WEIGHTS).read_bytes()
    losses = train("3")
    assert losses[:2] == first
    assert losses[2] < losses[1] < losses[0]
    assert (tmp_path / "out/0002" / checkpoints.ADAPTER_WEIGHTS).read_bytes() == kept
