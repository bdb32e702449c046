"""The benchmarks of the page run. What they measure here says nothing."""

from __future__ import annotations

import pytest

from benchmarks import __main__ as command
from benchmarks import page_open, viewer
from benchmarks.report import Spread

pytestmark = pytest.mark.slow


def test_every_answer_is_asked() -> None:
    args = command.make_parser({"viewer": viewer}).parse_args(["viewer", "--quick", "--repeats", "1"])
    result = viewer.run(args)
    asked = {str(row["answer"]) for row in result.rows}
    assert {"runs", "six curves", "a rollout", "two checkpoints compared"} <= asked
    assert all(float(str(row["median ms"])) >= 0 for row in result.rows)
    assert "CPU per rollout" in result.notes[-1]


def test_training_with_the_page_open_is_measured() -> None:
    args = command.make_parser({"page_open": page_open}).parse_args(["page_open", "--quick", "--repeats", "1"])
    cpu, wall, tabs = page_open.run(args).rows
    for row in (cpu, wall):
        assert isinstance(row["ratio"], Spread)
        assert row["ratio"].median > 0
    assert isinstance(tabs["page open"], Spread)
    assert tabs["page open"].median > 0
