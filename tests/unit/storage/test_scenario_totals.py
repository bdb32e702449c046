"""`data/cum/num_unique_scenarios`: what is counted, over restarts, by several processes, and in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import ConfigError
from art.metrics.groups import count_groups
from art.storage.history import UNIQUE_SCENARIOS
from tests.support.model_folder import paths_of


@pytest.fixture
def model(tmp_path: Path) -> art.Model:
    return art.Model(name="agent", project="games", base_path=str(tmp_path))


def group(*ids: object, of_group: object = None) -> art.TrajectoryGroup:
    trajectories = [art.Trajectory(reward=1, metadata={} if name is None else {"scenario_id": name}) for name in ids]
    return art.TrajectoryGroup(trajectories, metadata={} if of_group is None else {"scenario_id": of_group})


def counts(model: art.Model) -> list[Any]:
    rows = [json.loads(line) for line in paths_of(model).history.read_text().splitlines()]
    return [row.get(UNIQUE_SCENARIOS) for row in rows]


async def test_scenarios_of_training_are_counted_once_over_restarts(model: art.Model) -> None:
    await model.log([group("a", "a"), group("b")], split="train", step=1)
    again = art.Model(name="agent", project="games", base_path=model.base_path)
    await again.log([group("b"), group("rollout", of_group="c")], split="train", step=2)
    await again.log([group("held-out")], split="val", step=2)
    await again.log([group(None)], split="train", step=3)
    await again.log([group("a", 3, "3")], split="train", step=4)
    await model.log([group("<script>")], split="train", step=5)  # the first object learns of the other's
    assert counts(model) == [2, 3, None, None, 4, 5]
    assert "script" not in paths_of(model).totals.read_text()


async def test_scenarios_from_the_builder(model: art.Model) -> None:
    builder = model.metrics_builder("train")
    builder.add_data(step_num_scenarios=2, scenario_ids=["a", "b"])
    builder.add_data(scenario_ids=iter(["b", "c"]))
    builder.for_cost_context("eval").add_data(scenario_ids=["\ud800"])
    await model.log([group("c"), group("e")], split="train", step=1)
    await model.log(split="train", step=2)
    await model.log(split="test", step=2)
    assert counts(model) == [4, None, 5]
    with pytest.raises(ConfigError, match=r"write \['abc'\]"):
        builder.add_data(scenario_ids="abc")


def test_scenarios_of_a_step() -> None:
    groups = [group("a", "b"), group("c", of_group="a"), group(None), group(None), group()]
    assert count_groups(groups)["data/step_num_scenarios"] == 5
