"""Every notebook from top to bottom in a kernel of its own: it draws its pictures, and the model learns."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

pytest.importorskip("jupytext", reason="needs the extra notebooks: make test-notebooks")
pytest.importorskip("nbclient", reason="needs the extra notebooks: make test-notebooks")

from tests.support.notebooks import SOURCES
from tools.notebooks.run import run_notebook
from tools.notebooks.write import notebook_text

HELD_OUT = {
    "art_e": ("correct(before)", "correct(after)"),
    "auto_rl": ("before", "after"),
    "codenames": ("wins(before)", "wins(after)"),
    "game_2048": ("wins(before)", "wins(after)"),
    "langgraph_agent": ("[t.metrics['right'] for t in before]", "[t.metrics['right'] for t in after]"),
    "mcp_rl": ("before", "after"),
    "quick_start": ("rewards_before", "rewards_after"),
    "sft_then_rl": ("wins_of(base)", "wins_of(improved)"),
    "temporal_clue": ("solved(before)", "solved(after)"),
    "tic_tac_toe": ("[game.metrics['win'] for game in before]", "[game.metrics['win'] for game in after]"),
}
"""Held-out values before and after the training, as expressions of the notebook's names."""
MIN_GAIN = 0.1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_whole_notebook(source: Path, tmp_path: Path) -> None:
    expressions = HELD_OUT[source.stem]
    check = f"import json\nprint('held out:', json.dumps([{', '.join(expressions)}]))"
    run = run_notebook(source, tmp_path, last_cell=check)
    assert run.pictures()
    before, after = json.loads(run.text().rpartition("held out:")[2].splitlines()[0])
    assert statistics.fmean(after) > statistics.fmean(before) + MIN_GAIN


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_jupytext_writes_the_notebook_that_is_there(source: Path) -> None:
    assert source.with_suffix(".ipynb").read_text() == notebook_text(source), "write it again with: make notebooks"
