"""`evaluation.jsonl`: the rollouts of the held-out scenarios with their scores, before and after training.

{"step": 20, "rollouts": 4, "about": "1f0c...", "num_left_out": 0, "num_failed_rollouts": 0, "seconds": 31.5}
{"scenario": {...}, "before": [{...}, ...], "after": [{...}, ...]}          one line per scenario
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from art.recipes.comparison import CheckpointComparison, ComparedScenario
from art.storage.atomic import write_file
from art.task import Scenario

EVALUATION_FILE = "evaluation.jsonl"
_ROW = TypeAdapter(ComparedScenario)


def save_comparison(out: Path, comparison: CheckpointComparison, *, step: int, rollouts: int, about: str = "") -> None:
    head = {
        "step": step, "rollouts": rollouts, "about": about, "num_left_out": comparison.num_left_out,
        "num_failed_rollouts": comparison.num_failed_rollouts, "seconds": comparison.seconds,
    }  # fmt: skip
    rows = [head, *(_ROW.dump_python(item, mode="json") for item in comparison.compared)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_file(out / EVALUATION_FILE, lines.encode())


def load_comparison(
    out: Path, *, step: int, rollouts: int, scenarios: Sequence[Scenario], about: str = ""
) -> CheckpointComparison | None:
    """Load the comparison of two checkpoints that an earlier call saved in `out`.

    Returns:
        `None` if it was made with other arguments or scenarios, or lacks scenarios, so that it has to be made again.
    """
    path = out / EVALUATION_FILE
    if not path.exists():
        return None
    head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    compared = [_ROW.validate_python(row) for row in rows]
    same = (head["step"], head["rollouts"], head["about"]) == (step, rollouts, about)
    if not same or head["num_left_out"] or [item.scenario for item in compared] != list(scenarios):
        return None
    return CheckpointComparison(
        compared=compared, num_left_out=0, num_failed_rollouts=head["num_failed_rollouts"], seconds=head["seconds"]
    )
