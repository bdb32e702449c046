"""`art compare` with real models: checkpoints of a data directory, a folder, a tiny model, and a server that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from art.testing.scripted_server import ScriptedServer, failure
from art_recipes.comparing.model_comparison import read_comparison

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GAMES = 60


def art(*arguments: str, cwd: Path) -> tuple[int, str]:
    environment = os.environ | {"NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "art.cli.main", *arguments], cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_checkpoints_and_base_models_beside_each_other(tiny_model: Path, tmp_path: Path) -> None:
    train = ["train", "yes_no_maybe", "--base-model", str(tiny_model), "--data-dir", "data", "--name", "agent"]
    code, text = art(*train, "--steps", "4", cwd=tmp_path)
    assert code == 0, text
    with ScriptedServer(lambda body: failure(401, "wrong key")) as down:
        models = ["agent@0", "agent@latest", str(tiny_model), f"down={down.base_url}"]
        compare = ["compare", "yes_no_maybe", "--held-out", str(GAMES), "--data-dir", "data", "--models", *models]
        code, text = art(*compare, cwd=tmp_path)
        assert code == 4, text
        assert "wrong key" in text
        comparison = read_comparison(next((tmp_path / "data" / "comparisons").iterdir()))
        code, text = art(*compare, cwd=tmp_path)
        assert f"agent@latest: {GAMES} rollouts are kept from an earlier run" in text
        assert "serving it on this machine" not in text
    before, after, folder = (comparison.row(label) for label in ("agent@0", "agent@latest", tiny_model.name))
    assert before.headline is not None
    assert after.difference is not None
    assert folder.difference is not None
    assert (before.num_rollouts, before.where) == (GAMES, "yes_no_maybe/agent@0")
    assert after.where == "yes_no_maybe/agent@4"
    # Step 0 is the base model, and both drew the same random numbers.
    assert abs(folder.difference.mean) < 0.1
    assert after.difference.mean > 0.05
    assert after.prompt_tokens is not None
    assert after.turn_latency_s is not None
    assert comparison.row("down").headline is None
