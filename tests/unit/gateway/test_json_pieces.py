"""Values that are encoded in pieces give the same JSON as in one go."""

from __future__ import annotations

import json
from typing import Any

import pytest

from art.config import TrainConfig
from art.gateway.workers import json_pieces
from art.protocol.training import TrainRequest, WireGroup, WireHistory, WireTrajectory

ITEMS = [
    {"role": "user", "content": 'a "quoted" é😀' * 100},
    {"role": "assistant", "content": None, "n": [1, 2.5, True]},
]
REQUEST = TrainRequest(
    job_id="job-00001",
    groups=[
        WireGroup(trajectories=[WireTrajectory(reward=1 / 3, histories=[WireHistory(items=ITEMS)])] * 3),
        WireGroup(trajectories=[]),
    ],
    config=TrainConfig(learning_rate=1 / 7),
)


@pytest.mark.parametrize("depth", range(7))
@pytest.mark.parametrize("value", [REQUEST, {}, [], {"a": []}, {"a": {"b": [1, [2]]}}, ITEMS, "x", None, 0, [[], {}]])
def test_the_text_is_that_of_the_whole(value: Any, depth: int) -> None:
    whole = value.model_dump(mode="json") if isinstance(value, TrainRequest) else value
    assert json.loads(b"".join(json_pieces(value, depth))) == whole


def test_no_piece_is_larger_than_a_trajectory() -> None:
    largest = len(REQUEST.groups[0].trajectories[0].model_dump_json().encode())
    assert max(map(len, json_pieces(REQUEST, 4))) == largest


def test_what_json_has_no_number_for_is_null() -> None:
    assert b"".join(json_pieces({"a": [float("inf")]}, 2)) == b'{"a":[null]}'
