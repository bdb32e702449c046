"""What a chat request asks of the form of its answer, in all the words that clients use; conflicts name a parameter."""

from __future__ import annotations

from typing import Any

import pytest

from art.errors import InvalidRequestError
from art.protocol.chat_completions import CallRule, parse_chat_request
from tests.support.forms import FORMAT, MOVE, TOOLS, tool

PLAY = {"type": "function", "function": {"name": "play"}}


def parse(**fields: Any) -> Any:
    return parse_chat_request({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}),
        ({"response_format": FORMAT}, "json", MOVE),
        ({"guided_json": MOVE}, "json", MOVE),
        ({"guided_json": '{"type": "string"}'}, "json", {"type": "string"}),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"]),
        ({"structured_outputs": {"json": MOVE}}, "json", MOVE),
        ({"structured_outputs": {"json_object": True}}, "json", {"type": "object"}),
        ({"structured_outputs": {"regex": "a", "json": None, "json_object": False}}, "regex", "a"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
    ],
)
def test_forms_of_content(fields: dict[str, Any], kind: str, value: Any) -> None:
    form = parse(**fields).content_form
    assert (form.kind, form.value) == (kind, value)
    assert form.param.split(".")[0] == next(iter(fields))


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_no_form(fields: dict[str, Any]) -> None:
    assert parse(**fields).content_form is None


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, CallRule("none")),
        ({"parallel_tool_calls": False}, CallRule("none")),
        ({"tools": TOOLS}, CallRule("auto")),
        ({"tools": TOOLS, "tool_choice": "none"}, CallRule("none")),
        ({"tools": TOOLS, "tool_choice": "required"}, CallRule("required")),
        ({"tools": TOOLS, "parallel_tool_calls": False}, CallRule("auto", single=True)),
        ({"tools": TOOLS, "tool_choice": PLAY}, CallRule("required", "play", single=True)),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "undo"}},
            CallRule("required", "undo", single=True),
        ),
    ],
)
def test_rules_of_calls(fields: dict[str, Any], rule: CallRule) -> None:
    assert parse(**fields).call_rule == rule


def test_strict_tools() -> None:
    assert parse(tools=[tool("play", strict=True), tool("undo", strict=False)]).strict_tools == {"play"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": MOVE, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
        ({"guided_json": "no JSON"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_regex": " "}, "guided_regex"),
        ({"guided_regex": "a" * 65537}, "guided_regex"),
        ({"guided_json": {"enum": ["a" * 65536]}}, "guided_json"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": PLAY}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "stop"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
    ],
)  # fmt: skip
def test_what_is_refused_names_its_parameter(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(**fields)
    assert caught.value.param in (param, f"{param}.str")
    assert len(caught.value.message) < 400
