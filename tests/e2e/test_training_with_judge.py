"""Rewards from a judge alone: biased towards what it is shown first, noisy, and still good enough to learn from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from art.tasks.tic_tac_toe import TicTacToe
from art.testing.judge import ScriptedJudge, grade_messages

MIN_WIN_RATE = 0.80
"""Of 400 held-out games; after the warm start alone it is about 0.6."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tic_tac_toe_is_learnt_from_a_biased_judge(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("litellm")
    summary = tmp_path / "summary.json"
    with ScriptedJudge(grade_messages(TicTacToe().score_messages), position_bias=0.15, noise=0.15, seed=seed) as judge:
        subprocess.run(
            [
                sys.executable, "-m", "art.cli.main", "train", "tic_tac_toe", "--seed", str(seed), "--data-dir", tmp_path,
                "--judge", "openai/judge", "--judge-url", judge.base_url, "--held-out", "400", "--json", summary,
            ],
            cwd=tmp_path, env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}, check=True,
        )  # fmt: skip
        assert len(judge.requests) > 16 * 40 / 2, "groups that were seen before come from the cache"
    assert json.loads(summary.read_text())["evaluation"] >= MIN_WIN_RATE
