"""Deeply nested tool arguments are refused by name. Decoders and chat templates would fail on them with status 500."""

from __future__ import annotations

import json
from typing import Any

import pytest

from art.errors import InvalidRequestError
from art.gateway.renderer import template_messages
from art.protocol.chat import MAX_ARGUMENT_DEPTH, normalize_messages


def messages(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("depth", [MAX_ARGUMENT_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_deep_arguments_are_refused_by_name(depth: int, brackets: str) -> None:
    opening, closing = brackets[:-1], brackets[-1]
    text = opening * depth + ("0" if closing == "}" else "") + closing * depth
    with pytest.raises(
        InvalidRequestError, match=r"tool_calls\.0\.function\.arguments` has more than 64 lists and objects"
    ):
        normalize_messages(messages(text))


def test_other_arguments_are_taken() -> None:
    nested = '{"a":' * MAX_ARGUMENT_DEPTH + "0" + "}" * MAX_ARGUMENT_DEPTH
    for text in (nested, json.dumps({"code": "[" * 5000}), "no JSON at all", "[" * 60, ""):
        assert template_messages(normalize_messages(messages(text)))
