"""The CSV tracker: what the file holds, and that a resumed run goes on with the next row."""

from __future__ import annotations

import csv
from pathlib import Path

import art


async def test_a_line_for_each_metric_and_none_twice_after_a_resume(tmp_path: Path) -> None:
    for step in range(3):
        model = art.Model(name="a", project="p", base_path=str(tmp_path), report_metrics=["csv"])
        await model.log(metrics={"reward": 0.5 + step, "nan": float("nan")}, split="train", step=step)
        await model.close()
    with (tmp_path / "p" / "models" / "a" / "sinks" / "csv" / "metrics.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["row"], line["step"], line["value"]) for line in lines if line["metric"] == "train/reward"] == [
        ("0", "0", "0.5"), ("1", "1", "1.5"), ("2", "2", "2.5"),
    ]  # fmt: skip
    assert {line["metric"] for line in lines} & {"train/nan"} == set()
