"""What `art new` writes, used as its README says: demo, training, the adapter taken away."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ART = [sys.executable, "-m", "art.cli.main"]


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([*command], cwd=cwd, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("option", [[], ["--tool"]], ids=["text", "tool"])
def test_a_new_agent_is_trained_and_taken_away(option: list[str], tmp_path: Path) -> None:
    run(*ART, "new", "guesser", *option, cwd=tmp_path)
    folder = tmp_path / "guesser"
    shown = run(*ART, "demo", "--task", "guesser:Guesser", "--steps", "4", "--held-out", "100", "--json", "demo.json",
                cwd=folder)  # fmt: skip
    summary = json.loads((folder / "demo.json").read_text())
    assert 0.1 < summary["before"] < 0.95, "it can play, and has something to learn"
    assert summary["after"] > summary["before"] - 0.1
    assert re.search(r"[abc][+?-] [abc][+?-]", shown), "a game is shown"
    run(*ART, "train", "guesser:Guesser", "--base-model", "demo/guesser-seed0/model", "--steps", "2", "--groups", "4",
        cwd=folder)  # fmt: skip
    (block,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    (folder / "take_away.py").write_text(block)
    answer = run(sys.executable, "take_away.py", cwd=folder).strip()
    assert len(re.findall("[abc]", answer)) >= 3
