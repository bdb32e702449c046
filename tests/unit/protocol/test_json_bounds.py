"""The text of JSON is counted before anything is built from it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from art.errors import InvalidRequestError
from art.protocol.chat import JsonBounds, normalize_messages, short

TEXTS = '\\"[]{},:a\n😀'


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    text = "".join(rng.choice(TEXTS) for _ in range(rng.randrange(8)))
    if depth > 5 or kind < 0.3:
        return text
    if kind < 0.4:
        return rng.random()
    if kind < 0.7:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {f"{text}{i}": random_value(rng, depth + 1) for i in range(rng.randrange(4))}


def children(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else []


def count(value: Any) -> int:
    """Lists, objects and commas."""
    commas = max(0, len(children(value)) - 1)
    return isinstance(value, (list, dict)) + commas + sum(map(count, children(value)))


def depth(value: Any) -> int:
    return isinstance(value, (list, dict)) + max(map(depth, children(value)), default=0)


def feed(text: bytes, rng: random.Random, **limits: int) -> JsonBounds:
    bounds = JsonBounds(**{"max_values": 10**9, "max_depth": 10**9, **limits}, what="the text")
    while text:
        size = rng.randrange(1, 7)
        bounds.feed(text[:size])
        text = text[size:]
    return bounds


def test_counts_are_those_of_the_decoded_value() -> None:
    for seed in range(400):
        check_counts(random.Random(seed))


def check_counts(rng: random.Random) -> None:
    value = random_value(rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
    assert feed(text, rng, max_depth=depth(value), max_values=count(value)).num_values == count(value)
    if depth(value):
        with pytest.raises(InvalidRequestError, match="inside one another"):
            feed(text, rng, max_depth=depth(value) - 1)
        with pytest.raises(InvalidRequestError, match="values"):
            feed(text, rng, max_values=count(value) - 1)


def call_with(arguments: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def test_deep_arguments_are_refused_and_named() -> None:
    with pytest.raises(InvalidRequestError, match="64 lists and objects inside one another") as error:
        normalize_messages([{"role": "user", "content": "hi"}, call_with("[" * 65 + "]" * 65)])
    assert error.value.param == "messages.1.tool_calls.0.function.arguments"
    assert normalize_messages([call_with("[" * 64 + "]" * 64), call_with('"' + "[" * 1000)])


def test_values_of_all_arguments_count_together() -> None:
    half = "[" + "1," * 60_000 + "1]"
    assert normalize_messages([call_with(half)])
    with pytest.raises(InvalidRequestError, match="the arguments of all calls"):
        normalize_messages([call_with(half), call_with(half)])


def test_errors_write_out_only_the_beginning_of_a_large_value() -> None:
    class Counted(str):
        num_written = 0

        def __repr__(self) -> str:
            Counted.num_written += 1
            return "'x'"

    assert short([Counted()] * 100_000).startswith("['x', ")
    assert Counted.num_written < 100
    assert short("x" * 10**6) == "'" + "x" * 76 + "..."
    assert short({"b": 1, "a": [None]}) in ("{'b': 1, 'a': [None]}", "{'a': [None], 'b': 1}")
