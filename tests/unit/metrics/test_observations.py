"""Observations are exchanged with those of the same turn and tool, and nothing else of a conversation changes."""

from __future__ import annotations

import copy
import random
from typing import Any

from art.metrics.observations import split_at_answers, swap_observations


def game(*boards: str) -> list[dict[str, Any]]:
    """A conversation with a board before each answer, and an answer that names its turn."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "play"}]
    for turn, board in enumerate(boards):
        messages += [{"role": "user", "content": board}, {"role": "assistant", "content": f"move {turn}"}]
    return messages


def call(name: str, result: str, call_id: str) -> list[dict[str, Any]]:
    calls = [{"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}]
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": result},
        {"role": "assistant", "content": "done"},
    ]


def test_a_conversation_is_cut_behind_each_answer() -> None:
    whole = game("a", "b")
    assert split_at_answers(whole) == [whole[:3], whole]


def test_only_the_last_observation_changes_and_it_comes_from_the_same_turn() -> None:
    given = [game("a0"), game("a0", "a1"), game("b0", "b1"), game("b0", "b1", "b2")]
    before = copy.deepcopy(given)
    swaps = swap_observations(given, random.Random(0))
    assert given == before
    assert [swap.index for swap in swaps] == [1, 2]  # turns 0 and 2 have a single observation
    assert [swap.messages for swap in swaps] == given[1:3]
    assert [swap.swapped for swap in swaps] == [game("a0", "b1"), game("b0", "a1")]


def test_equal_observations_cannot_be_exchanged() -> None:
    assert swap_observations([game("a"), game("a"), game("a")], random.Random(0)) == []
    assert swap_observations([game("a")], random.Random(0)) == []
    assert swap_observations([[{"role": "assistant", "content": "hello"}]], random.Random(0)) == []


def test_the_other_observation_is_of_the_most_similar_length() -> None:
    given = [game("1234"), game("5678"), game("a long board"), game("x")]
    for seed in range(20):
        swapped = [swap.swapped[1]["content"] for swap in swap_observations(given, random.Random(seed))]
        assert swapped[:2] == ["5678", "1234"]
        assert swapped[2] in ("1234", "5678")


def test_results_of_a_tool_are_exchanged_with_those_of_the_same_tool() -> None:
    given = [call("look", "tree", "c1"), call("look", "lake", "c2"), call("count", "7", "c3"), call("count", "8", "c4")]
    swapped = [swap.swapped for swap in swap_observations(given, random.Random(0))]
    assert [messages[2]["content"] for messages in swapped] == ["lake", "tree", "8", "7"]
    assert [messages[2]["tool_call_id"] for messages in swapped] == ["c1", "c2", "c3", "c4"]


def test_the_same_seed_exchanges_the_same() -> None:
    given = [game(str(number)) for number in range(10, 30)]
    assert swap_observations(given, random.Random(3)) == swap_observations(given, random.Random(3))
    assert swap_observations(given, random.Random(3)) != swap_observations(given, random.Random(4))


def test_content_in_parts_is_compared_by_its_text() -> None:
    given = [game("a"), game("b")]
    given[1][1] = {"role": "user", "content": [{"type": "text", "text": "b"}]}
    swaps = swap_observations(given, random.Random(0))
    assert [swap.swapped[1]["content"] for swap in swaps] == [[{"type": "text", "text": "b"}], "a"]
