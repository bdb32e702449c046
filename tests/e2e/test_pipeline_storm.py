"""A pipeline survives the death of each of its processes, and power cuts: the same rollouts, log and losses."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pipeline_storm, power_cut
from benchmarks.kill_storm import VICTIMS
from benchmarks.pipeline_storm import LOSSES, Trained, compare, measure


@pytest.fixture
def each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storm kills each kind of process once, the script first."""
    remaining, choices = list(VICTIMS), random.Random.choices

    def next_victim(self: random.Random, names: Any, weights: Any = None, **options: Any) -> list[Any]:
        # Names of temporary files are drawn too, without weights.
        return choices(self, names, **options) if weights is None else [remaining.pop()]

    monkeypatch.setattr(pipeline_storm, "AT_ONCE_SHARE", 0.25)
    monkeypatch.setattr(random.Random, "choices", next_victim)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_pipeline_survives_the_death_of_each_of_its_processes(
    each_once: None, tiny_model: Path, tmp_path: Path, staleness: int
) -> None:
    row, breaches = measure(tmp_path, tiny_model, len(VICTIMS), staleness, seed=0)
    assert breaches == []
    assert row["kills"] == len(VICTIMS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_pipeline_goes_on_wherever_a_power_cut_has_ended_the_database(tiny_model: Path, tmp_path: Path) -> None:
    cuts, breaches, _ = power_cut.measure(tmp_path, tiny_model, 3)
    assert breaches == []
    assert [cut["exchanges"] > 0 for cut in cuts] == [cut["said"] for cut in cuts]
    assert max(cut["steps"] for cut in cuts) > 0


def test_a_difference_is_a_breach() -> None:
    losses = [dict.fromkeys(LOSSES, 0.5) for _ in range(2)]
    rollouts = [Counter({("a", "1"): 1, ("b", "2"): 1}), Counter({("c", "3"): 1})]
    calm = Trained(rollouts=rollouts, losses=losses, num_rows=2)
    assert compare(calm, calm, 0) == (0.0, [])
    swapped = dataclasses.replace(calm, rollouts=rollouts[::-1])
    assert compare(swapped, calm, 2) == (0.0, [])
    for other, staleness, breach in (
        (swapped, 0, "step 1 trained other rollouts"),
        (dataclasses.replace(calm, num_rows=3), 2, "3 rows of 2 steps with kills"),
        (dataclasses.replace(calm, rollouts=[rollouts[0], rollouts[0]]), 2, "trained twice with kills"),
        (dataclasses.replace(calm, rollouts=[rollouts[0], Counter()]), 2, "1 rollouts are missing"),
        (dataclasses.replace(calm, losses=[losses[0], losses[1] | {"loss/train": 0.6}]), 0, "loss/train of step 2 is 0.6"),
        (dataclasses.replace(calm, losses=[losses[0], losses[1] | {"loss/train": float("nan")}]), 0, "is nan"),
    ):  # fmt: skip
        assert any(breach in one for one in compare(other, calm, staleness)[1]), breach
