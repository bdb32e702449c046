"""A scripted judge whose true score of a trajectory is the last number that the agent wrote."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from art.rewards import JudgeSettings
from art.testing.judge import ScriptedJudge
from art.trajectory import Trajectory, TrajectoryGroup

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or importing litellm waits for a download

QUESTION = {"role": "user", "content": "How many moons has Mars?"}


def true_score(trajectory: dict[str, Any]) -> float:
    return float(re.findall(r"worth ([\d.]+)", str(trajectory["messages"]))[-1])


def make_group(*scores: float, **fields: Any) -> TrajectoryGroup:
    trajectories = [
        Trajectory(messages_and_choices=[QUESTION, {"role": "assistant", "content": f"this is worth {score}"}])
        for score in scores
    ]
    return TrajectoryGroup(trajectories, **fields)


@pytest.fixture(name="make_group")
def make_group_fixture() -> Callable[..., TrajectoryGroup]:
    return make_group


@pytest.fixture
def settings() -> JudgeSettings:
    return JudgeSettings(first_wait_s=0.01, seed=0)


@pytest.fixture
def start_judge() -> Iterator[Callable[..., ScriptedJudge]]:
    """A function that starts scripted judges, which are stopped at the end of the test."""
    started: list[ScriptedJudge] = []

    def start(**script: Any) -> ScriptedJudge:
        judge = ScriptedJudge(**{"grade": true_score, **script})
        started.append(judge.__enter__())
        return judge

    yield start
    for judge in started:
        judge.__exit__()


def address(judge: ScriptedJudge) -> dict[str, Any]:
    return {"base_url": judge.base_url, "api_key": "none"}


@pytest.fixture(name="address")
def address_fixture() -> Callable[[ScriptedJudge], dict[str, Any]]:
    return address
