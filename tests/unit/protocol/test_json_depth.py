"""Deeply nested tool arguments are refused by name. Decoders and chat templates would fail on them with status 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art.errors import InvalidRequestError
from art.gateway.format.renderer import template_messages
from art.protocol.chat import MAX_ARGUMENTS_DEPTH, normalize_messages
from art.protocol.json_depth import is_deeper


def depth_of(value: Any) -> int:
    if isinstance(value, (list, dict)):
        return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)
    return 0


@given(
    st.recursive(
        st.none() | st.integers() | st.text(alphabet='a"\\[]{}\n'),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='"\\[{'), inner, max_size=3),
    ),
    st.integers(0, 4),
)
def test_the_depth_is_that_of_the_decoded_value(value: Any, limit: int) -> None:
    for text in (json.dumps(value), json.dumps(value, indent=1)):
        assert is_deeper(text, limit) == (depth_of(value) > limit)


def messages(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("depth", [MAX_ARGUMENTS_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_deep_arguments_are_refused_by_name(depth: int, brackets: str) -> None:
    opening, closing = brackets[:-1], brackets[-1]
    text = opening * depth + ("0" if closing == "}" else "") + closing * depth
    with pytest.raises(InvalidRequestError, match=r"tool_calls\.0\.function\.arguments` is nested more than 64 deep"):
        normalize_messages(messages(text))


def test_other_arguments_are_taken() -> None:
    nested = '{"a":' * MAX_ARGUMENTS_DEPTH + "0" + "}" * MAX_ARGUMENTS_DEPTH
    for text in (nested, json.dumps({"code": "[" * 5000}), "no JSON at all", "[" * 60, ""):
        assert template_messages(normalize_messages(messages(text)))
