"""A scripted judge whose true score of a trajectory is the last number that the agent wrote."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from art.rewards import JudgeSettings
from art.testing.judge import ScriptedJudge, read_prompt
from art.testing.scripted_server import Reply, completion, failure
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


@dataclass(slots=True)
class FaultyJudge(ScriptedJudge):
    """A scripted judge with every mistake of the answers that RULER has to read."""

    criteria: dict[str, Callable[[dict[str, Any]], float]] | None = None
    """Scores by criterion, for a rubric of criteria. A criterion without a function gets the score of `grade`."""
    max_chars: int | None = None
    """Largest number of characters of a request's messages; longer ones are refused as too long for the context."""
    known_faults: ClassVar[tuple[str, ...]] = (
        *ScriptedJudge.known_faults,
        "out_of_range", "not_finite", "contradiction",  # unusable: ask again
        "permuted", "doubled", "unknown_id", "fenced", "quoted", "overshoot",  # deviations that must be accepted
    )  # fmt: skip

    def reply(self, body: dict[str, Any], fault: Any, rng: random.Random) -> Reply:
        if self.max_chars is not None and sum(len(m["content"]) for m in body["messages"]) > self.max_chars:
            return failure(400, "this model's maximum context length is exceeded", "context_length_exceeded")
        if fault in ScriptedJudge.known_faults:
            return ScriptedJudge.reply(self, body, fault, rng)
        rows = self.rows(body, rng)
        first = rows[0]
        score = first["score"]
        wrong_scores = {"out_of_range": 7.5, "overshoot": 1.004, "not_finite": float("nan"), "quoted": str(score)}
        first["score"] = wrong_scores.get(fault, score)
        rows = {
            "doubled": [*rows, dict(first)],
            "contradiction": [*rows, first | {"score": 1 - score if score != 0.5 else 0.9}],
            "unknown_id": [*rows, first | {"trajectory_id": "t-zzzzz", "score": 1.0}],
            "permuted": rows[::-1],
        }.get(fault, rows)
        text = json.dumps({"scores": rows})
        return completion(
            body, {"content": f"Let me think about it.\n```json\n{text}\n```" if fault == "fenced" else text}
        )

    def rows(self, body: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
        rows = ScriptedJudge.rows(self, body, rng)
        if self.criteria is not None:
            item = body["response_format"]["json_schema"]["schema"]["properties"]["scores"]["items"]
            asked = item["properties"]["criteria"]["required"]
            trajectories, _ = read_prompt(body["messages"][1]["content"])
            for row, trajectory in zip(rows, trajectories, strict=True):
                row["criteria"] = {
                    name: self.criteria[name](trajectory) if name in self.criteria else row["score"] for name in asked
                }
        return rows


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
        judge = FaultyJudge(**{"grade": true_score, **script})
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
