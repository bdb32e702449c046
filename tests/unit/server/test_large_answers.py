"""While a large answer is encoded, others are answered."""

from __future__ import annotations

import asyncio
import json

import orjson

from art.protocol.rollouts import RolloutRecord
from art.server.answers import encode_json

HISTORY = {"tools": None, "messages_and_choices": [{"role": "user", "content": "hello " * 2000}] * 5}
RECORD = RolloutRecord(
    rollout_id="r1", project="games", model=None, group_id=None, scenario_id=None, reward=0.5, outcome="ok", error=None,
    metrics={}, metadata={}, num_exchanges=200, first_policy_version=0, last_policy_version=0, untrainable=None,
    trained_by=None, created_at=0.0, histories=[HISTORY] * 200,
)  # fmt: skip


async def test_others_get_turns_between_the_parts_of_a_large_answer() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(count())
    body = await encode_json(RECORD)
    other.cancel()
    assert len(body) > 10 * 2**20
    assert turns > 150
    assert json.loads(body) == RECORD.model_dump(mode="json")


async def test_small_answers_are_encoded_as_in_one_go() -> None:
    answer = {"id": "x", "choices": [{"message": {"content": "é", "tool_calls": [{"a": [1]}]}}], "usage": {"n": 1}}
    assert await encode_json(answer) == orjson.dumps(answer)
    assert (
        await encode_json(RECORD.model_copy(update={"histories": []}))
        == RECORD.model_copy(update={"histories": []}).model_dump_json().encode()
    )
