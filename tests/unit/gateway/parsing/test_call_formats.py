"""Readers of single formats: types by the schema, tags inside strings, and text that is no call."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from art.gateway.calls import parameter_schemas
from art.gateway.parse import Delta, ParsedMessage, TaggedParser, Tags
from art.gateway.tokenizer import Tokenizer
from art.gateway.tool_calls import CALL_FORMATS, typed
from tools.families import real, templates

FORMATS = {one.name: one for one in CALL_FORMATS}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return real.load(templates.QWEN3_CODER, ("<think>", "</think>")).tokenizer


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5.0),
        ("5.5", {"type": "integer"}, "5.5"),
        ("2.5", {"type": "number"}, 2.5),
        ("1e999", {"type": "number"}, sys.float_info.max),
        ("1e999", None, sys.float_info.max),
        ("[1e999]", {"type": "array"}, [sys.float_info.max]),
        ("5", {"type": [{}], "enum": 5, "anyOf": 5}, 5),
        ("NaN", {"type": "number"}, "NaN"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("{'x': [1, None]}", {"type": "object"}, {"x": [1, None]}),
        ('{"x": [1, null]}', {"type": "object"}, {"x": [1, None]}),
        ("[1,", {"type": "array"}, "[1,"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": "string", "nullable": True}, None),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5),
        ("five", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "five"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("5", None, 5),
        ('"5"', None, '"5"'),
        ("null", None, None),
        ("word", {}, "word"),
    ],
)
def test_an_argument_has_the_type_of_its_schema(text: str, schema: dict[str, Any] | None, value: Any) -> None:
    result = typed(text, schema)
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("functions", "<function=f>\n<parameter=a>\n\nx\n\n</parameter>\n</function>", [{"a": "\nx\n"}]),
        ("functions", "<function=f><parameter=a>x</parameter></function>", [{"a": "x"}]),
        ("functions", "<function=f>\n</function>", [{}]),
        ("functions", "<function=f>\n<parameter=a>\nx </parameter> y\n</parameter>\n</function>", [{"a": "x </parameter> y"}]),
        ("functions", "<function=f></function>\n<function=g></function>", [{}, {}]),
        ("functions", "<function=f>\n<parameter=a>\nx\n</parameter>", None),
        ("functions", "<function=f>\n<parameter=a>\nx\n</function>", None),
        ("functions", "<function=f>and<parameter=a>x</parameter></function>", None),
        ("functions", "<function=f><parameter=a>x</parameter><parameter=a>y</parameter></function>", None),
        ("functions", '{"name": "f"}', None),
        ("seed", "<function=f>\n<parameter=a>\nx\n</parameter>\n</function>", [{"a": "\nx\n"}]),
        ("glm", "f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n", [{"a": "x"}]),
        ("glm", "f", [{}]),
        ("glm", "f and more", None),
        ("glm", '{"name": "f"}', None),
        ("minimax-m2", '\n<invoke name="f">\n<parameter name="a">x</parameter>\n</invoke>\n<invoke name="g">\n</invoke>', [{"a": "x"}, {}]),
        ("minimax-m2", '<invoke name="f"><parameter name="a">x</invoke>', None),
        ("cohere", '[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]', [{"a": 1}]),
        ("cohere", '[{"name": "f"}, 1]', None),
        ("internlm", '<|plugin|>\n{"name": "f", "parameters": {"a": "x"}}', [{"a": "x"}]),
        ("internlm", '<|interpreter|>\nprint(1)', None),
        ("internlm", '<|plugin|>{"name": "f"', None),
        ("lfm2", "[f(a='it\\'s', b=[1, {'x': None}]), g()]", [{"a": "it's", "b": [1, {"x": None}]}, {}]),
        ("lfm2", "[f(1)]", None),
        ("lfm2", "[f(a=1, a=2)]", None),
        ("lfm2", "f(a=1)", None),
        ("lfm2", "[f(a=open('x'))]", None),
        ("lfm2", "[f(a='it's, ok', b=2)]", None),
        ("gemma-4", 'call:f{a:<|"|>x, y}<|"|>,b:[1,{c:null}],d:None,e:true}', [{"a": "x, y}", "b": [1, {"c": None}], "d": None, "e": True}]),
        ("gemma-4", "call:f{}", [{}]),
        ("gemma-4", "call:f{a:x}", None),
        ("gemma-4", "call:f{a:1 b:2}", None),
        ("gemma-4", "call:f{a:" + "[" * 100_000, None),
        ("gemma-4", "call:f{a:1}}", None),
    ],
)  # fmt: skip
def test_each_reader(name: str, text: str, arguments: list[dict[str, Any]] | None) -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
    calls = FORMATS[name].read(text, parameter_schemas([tool]))
    assert (None if calls is None else [json.loads(call.arguments) for call in calls]) == arguments


def parsed(tokenizer: Tokenizer, name: str, text: str) -> ParsedMessage:
    """Parse at once and token by token, which must agree."""
    ids = tokenizer.encode(text, add_special_tokens=False)

    def make() -> TaggedParser:
        return TaggedParser(tokenizer, Tags.of(tokenizer), in_reasoning=False, schemas={}, calls=FORMATS[name])

    whole, pieces, deltas = make(), make(), list[Delta]()
    whole.push(ids)
    result = whole.finish()
    for token in ids:
        pieces.push([token])
        deltas += pieces.take()
    assert pieces.finish() == result
    deltas += pieces.take()
    assert "".join(delta.content for delta in deltas) == result.content
    return result


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (f'<tool_call>{{"name": "f", "arguments": {{"a": "x </tool_call> y"}}}}</tool_call>{CALL}',
         '<tool_call>{"name": "f", "arguments": {"a": "x </tool_call> y"}}</tool_call>', 1),
        (f"<tool_call>bad</tool_call>\n{CALL}", "<tool_call>bad</tool_call>", 1),
        (f"<tool_call>bad</tool_call>\n<tool_call>worse</tool_call>{CALL}{CALL}", "<tool_call>bad</tool_call>\n<tool_call>worse</tool_call>", 2),
        ("a <tool_call>bad</tool_call> b\n", "a <tool_call>bad</tool_call> b\n", 0),
        ("<tool_call>" + 20 * "</tool_call>", "<tool_call>" + 20 * "</tool_call>", 0),
        ("<tool_call>" + 20 * "</tool_call>" + CALL, "<tool_call>" + 20 * "</tool_call>", 1),
    ],
)  # fmt: skip
def test_malformed_calls_stay_in_the_content(text: str, content: str, num_calls: int, tokenizer: Tokenizer) -> None:
    message = parsed(tokenizer, "tagged", text)
    assert (message.content, len(message.tool_calls)) == (content, num_calls)


@pytest.mark.parametrize(
    ("text", "num_calls"), [('<|python_tag|>{"name": "f", "parameters": {}}', 1), ("<b>x", 0), ("<|py", 0)]
)
def test_a_beginning_of_several_tokens_is_waited_for(text: str, num_calls: int, tokenizer: Tokenizer) -> None:
    message = parsed(tokenizer, "objects", text)
    assert len(message.tool_calls) == num_calls
    assert message.content == ("" if num_calls else text)
