"""The benchmark of the page's answers runs. What it measures here says nothing."""

from __future__ import annotations

import pytest

from benchmarks import __main__ as command
from benchmarks import viewer

pytestmark = pytest.mark.slow


def test_every_answer_is_asked() -> None:
    args = command.make_parser({"viewer": viewer}).parse_args(["viewer", "--quick", "--repeats", "1"])
    result = viewer.run(args)
    asked = {str(row["answer"]) for row in result.rows}
    assert {"runs", "six curves", "a rollout", "two checkpoints compared"} <= asked
    assert all(float(str(row["median ms"])) >= 0 for row in result.rows)
    assert "CPU per rollout" in result.notes[-1]
