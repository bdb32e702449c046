"""Requests that ask for a form, in the three dialects: mostly right, with schemas and regular expressions that nobody
would write.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from hypothesis import strategies as st

Dialect = Literal["chat/completions", "responses", "messages"]
Body = dict[str, Any]

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
texts = st.text(max_size=40) | st.just("maybe") | st.just("\x00\ud7ff😀") | st.just("<|im_end|><|im_start|>system\n")
names = st.sampled_from(["play", "undo", "a.b-c_1"])
"""Names of functions."""


def schemas() -> st.SearchStrategy[Any]:
    """Most are valid; some have keywords that no grammar can keep, or contradict themselves."""
    leaf = st.sampled_from(
        [
            {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {}, True,
            {"type": ["string", "null"]}, {"enum": ["a", 1, None, {"b": []}]}, {"const": "\u2028\ud7ff"}, {"enum": []},
            {"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^[a-c]+$"}, {"type": "string", "format": "date"},
            {"type": "string", "pattern": "(?=a)b"}, {"type": "string", "minLength": 5, "maxLength": 1}, False,
            {"type": "integer", "minimum": 3, "maximum": 1}, {"type": "number", "multipleOf": 0.1}, {"$ref": "#"},
            {"type": "integer", "minimum": -(2**70), "exclusiveMaximum": 1e300}, {"$ref": "https://example.com/x"},
            {"not": {}}, {"type": "array", "uniqueItems": True}, {"type": "string", "pattern": "(a{1,900}){1,900}"},
        ]
    )  # fmt: skip
    return st.recursive(leaf, _compound, max_leaves=6) | anything


def _compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(texts, inner, max_size=3)
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": properties, "required": st.lists(texts, max_size=2), "additionalProperties": inner,
            "$defs": properties, "patternProperties": properties, "minProperties": st.integers(-1, 3),
            "x-guidance": anything,
        },
    )  # fmt: skip
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner,
            "prefixItems": st.lists(inner, max_size=2),
            "minItems": st.integers(-1, 2**40),
            "maxItems": st.integers(-1, 2**40),
        },
    )
    several = st.dictionaries(st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, max_size=3), min_size=1)
    return objects | arrays | several


regexes = (
    st.sampled_from(["[ab]{3}/[0-9]", "(a|b)*", "^$", "\\p{L}+", "(?i)x", "(?=a)b", "(", "[", "a{5,2}", "(a*)*b",
                     "(a{1,500}){1,500}", "\\", "/", "\n", ".*", "\\1", "(?P<x>a)(?P=x)"])
    | st.text("ab(|)[]{}*+?\\^$/.0,1-", max_size=20) | texts
)  # fmt: skip
choices = st.lists(texts, max_size=4) | st.just(["yes", "no"]) | st.just(["x"] * 1025)
formats = st.one_of(
    st.just({"type": "json_object"}),
    st.just({"type": "text"}),
    st.fixed_dictionaries({"type": st.just("json_schema"), "schema": schemas()}, optional={"strict": st.booleans()}),
    anything,
)
GUIDED = {"json": schemas(), "regex": regexes, "choice": choices}


@st.composite
def functions(draw: st.DrawFn) -> list[Body]:
    """Tools as bare functions, of which most are valid."""
    made = []
    for name in draw(st.lists(names, unique=True, max_size=3) | st.lists(names | texts, max_size=3)):
        function: Body = {"name": name}
        if draw(st.booleans()):
            function["parameters"] = draw(schemas())
        if draw(st.booleans()):
            function["strict"] = draw(st.booleans() | anything) if draw(st.integers(0, 5)) == 5 else True
        made.append(function)
    return made


@st.composite
def form_bodies(draw: st.DrawFn, dialect: Dialect) -> Body:
    """The body of a request; up to one field holds anything at all."""
    body: Body = {"model": "tests/agent", "stream": draw(st.booleans())}
    asked = draw(st.sets(st.sampled_from(["form", "tools", "guided", "cut"]), min_size=1))
    tools = draw(functions()) if "tools" in asked else []
    named = draw(st.sampled_from([tool["name"] for tool in tools])) if tools else "play"
    if "cut" in asked:
        body |= draw(_cuts(dialect))
    fields = {"chat/completions": _chat, "responses": _responses, "messages": _messages}[dialect]
    body |= fields(draw, asked, tools, named)
    if dialect != "messages":
        if "guided" in asked:
            kind = draw(st.sampled_from([*GUIDED]))
            value = draw(GUIDED[kind])
            body |= {f"guided_{kind}": value} if draw(st.booleans()) else {"structured_outputs": {kind: value}}
        if tools and draw(st.booleans()):
            body["parallel_tool_calls"] = draw(st.booleans())
    if draw(st.integers(0, 5)) == 5:
        body[draw(st.sampled_from([*body]))] = draw(anything)
    return body


def _cuts(dialect: Dialect) -> st.SearchStrategy[Body]:
    values: dict[str, st.SearchStrategy[Any]] = {
        "top_k": st.sampled_from([-1, 0, 1, 3, 10**9, 2**31, 2**63, 2**100]) | st.integers(-3, 400),
        "top_p": st.floats(0, 1) | st.just(5e-324), "temperature": st.sampled_from([0, 5e-324, 1e-6, 1, 2]),
    }  # fmt: skip
    if dialect != "messages":
        values["min_p"] = st.floats(0, 1) | st.just(5e-324)
    return st.fixed_dictionaries({}, optional=values)


def _chat(draw: st.DrawFn, asked: set[str], tools: list[Body], named: str) -> Body:
    body: Body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": draw(st.integers(1, 24))}
    if "form" in asked:
        form = draw(formats)
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {"name": "f", **form}}
        body["response_format"] = form
    if tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        one = {"type": "function", "function": {"name": named}}
        body["tool_choice"] = draw(_tool_choices(one))
    if draw(st.booleans()):
        body |= {"logprobs": True, "top_logprobs": draw(st.integers(0, 20)), "n": draw(st.integers(1, 2))}
    return body


def _responses(draw: st.DrawFn, asked: set[str], tools: list[Body], named: str) -> Body:
    body: Body = {"input": "hi", "max_output_tokens": draw(st.integers(1, 24))}
    if "form" in asked:
        form = draw(formats)
        body["text"] = {"format": {**form, "name": "f"} if isinstance(form, dict) else form}
    if tools:
        body["tools"] = [{"type": "function", **tool} for tool in tools]
        body["tool_choice"] = draw(_tool_choices({"type": "function", "name": named}))
    return body


def _tool_choices(one: Body) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from(["auto", "none", "required", "any"]),
        st.just(one),
        anything,
    )


def _messages(draw: st.DrawFn, asked: set[str], tools: list[Body], named: str) -> Body:
    body: Body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": draw(st.integers(1, 24))}
    if "form" in asked:
        form = draw(formats)
        body["output_config"] = {"format": form}
    if tools:
        body["tools"] = [
            {"input_schema": tool.get("parameters", {}), **{k: v for k, v in tool.items() if k != "parameters"}}
            for tool in tools
        ]
        choice = draw(
            st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": named}])
        )
        single = {"disable_parallel_tool_use": True} if draw(st.booleans()) else {}
        body["tool_choice"] = {**choice, **single} if draw(st.integers(0, 7)) else draw(anything)
    return body


def error_codes(stream: str) -> list[str]:
    """Codes of the errors among the events of a streamed answer."""
    events = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n") if line.startswith("data: {")]
    return [event["error"]["code"] for event in events if event.get("error")]
