"""Calls with a tag per argument: the style of each real template is found, and what its grammar lets through is valid."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art.errors import InvalidRequestError
from art.gateway.structure.patterns import FORMATS
from art.gateway.structure.proof import find_problems
from art.gateway.structure.style import find_style
from tests.support.tagged_calls import model, of
from tools.families import real

SOURCES = {source.name: source for source in real.sources()}
TAGGED = [
    *("Qwen3-Coder", "Qwen3.5-4B", "Qwen3.6", "Qwen3.8", "StepFun3.5-Flash"),
    *("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Nemotron-3-Super", "Nemotron-3-Ultra"),
    *("ByteDance-Seed-OSS", "MiniMax-M2", "GLM-4.6", "GLM-4.7-Flash", "ling-3.0-flash", "Spark2.5"),
]
DIFFERENT = ["Qwen3-Coder", "Qwen3.6", "ByteDance-Seed-OSS", "MiniMax-M2", "GLM-4.6", "ling-3.0-flash"]


@pytest.mark.parametrize("name", TAGGED)
def test_the_style_of_a_real_template_is_found_and_proved(name: str) -> None:
    one = model(name)
    assert find_problems(one.renderer, one.style, one.vocabulary) == (None, None)
    assert one.style.calls is not None
    assert one.style.calls.between is not None
    assert one.tags.closing_tags[0] in ("</parameter>", "</arg_value>")
    if name.startswith("GLM"):
        assert one.style.calls.end == one.renderer.tokenizer.token_id("<|observation|>")


def test_words_and_separators_are_those_of_the_template() -> None:
    assert model("Qwen3-Coder").tags.words == {True: "True", False: "False", None: "None"}
    assert model("Qwen3.6").tags.words == {True: "true", False: "false", None: "null"}
    assert not model("ByteDance-Seed-OSS").tags.nested_json
    assert all(model(name).tags.nested_json for name in TAGGED if name != "ByteDance-Seed-OSS")


def test_formats_without_closing_tags_have_no_style() -> None:
    for name in ("LFM2-1.2B", "gemma-4-E2B-it"):
        assert find_style(real.load(SOURCES[name])).calls is None


SHORT = {"type": "string", "maxLength": 4}
COLOR = {"enum": ["red", "blue"], "type": "string"}
POINT = of({"x": {"type": "integer", "minimum": 0, "maximum": 99}}, "x", additionalProperties=False)
SCALARS: list[Any] = [
    SHORT,
    COLOR,
    {"const": "a b"},
    {"enum": ["a", 5, None, False]},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -5, "maximum": 500},
    {"type": "number", "minimum": 0, "maximum": 2},
    {"type": "string", "pattern": "^[0-9]{2}-[a-z]$"},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "array", "items": COLOR, "maxItems": 2},
    POINT,
    {"$ref": "#/$defs/Color"},
    {"type": "array", "items": {"$ref": "#/$defs/Point"}, "minItems": 1, "maxItems": 2},
]
VALUES = st.one_of(
    st.sampled_from(SCALARS),
    st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
    st.lists(st.sampled_from(["string", "boolean", "null"]), min_size=1, max_size=3, unique=True).map(
        lambda kinds: {"type": kinds, "maxLength": 4}
    ),
)
KEYS = st.sampled_from(["a", "b c", "d-e", "ü", "_"])
DEFINITIONS = {"Color": COLOR, "Point": POINT}


@st.composite
def parameters_(draw: st.DrawFn) -> dict[str, Any]:
    properties = draw(st.dictionaries(KEYS, VALUES, max_size=4))
    required = [key for key in properties if draw(st.booleans())]
    return of(properties, *required, additionalProperties=False, **{"$defs": DEFINITIONS})


@given(st.sampled_from(DIFFERENT), parameters_(), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_what_is_drawn_is_read_and_valid(name: str, parameters: dict[str, Any], seed: int) -> None:
    one = model(name)
    grammar = one.grammar(parameters)
    ids = one.walk(grammar, seed)
    assert ids is not None
    (arguments,) = one.calls(ids, parameters)
    jsonschema.validate(arguments, parameters)
    assert list(arguments) == [key for key in parameters["properties"] if key in arguments]


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=40)


@given(st.sampled_from(DIFFERENT), TEXT, st.none() | st.booleans() | st.integers(-999, 999))
@settings(max_examples=60, deadline=None)
def test_what_the_template_writes_is_let_through_and_comes_back(name: str, text: str, value: Any) -> None:
    one = model(name)
    parameters = of({"text": {"type": "string"}, "value": {"type": ["null", "boolean", "integer"]}}, "text")
    calls = [{"text": text, "value": value}, {"text": text}]
    ids = one.written(calls, parameters)
    assert one.accepts(one.grammar(parameters, single=False), ids)
    assert one.calls(ids, parameters) == calls


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_string_holds_anything_but_closing_tags(name: str) -> None:
    one = model(name)
    parameters = of({"text": {"type": "string"}, "more": {"type": "string"}}, "text")
    grammar = one.grammar(parameters)
    for text in ("", "\n", "\n\na\n", "<b>x</b>", "</param", "<parameter=more>", "5", "true", 'a"\\\n'):
        ids = one.written([{"text": text}], parameters)
        assert one.accepts(grammar, ids), text
        assert one.calls(ids, parameters) == [{"text": text}]
    encode = one.renderer.tokenizer.encode
    written = one.written([{"text": "~"}], parameters)
    place = written.index(encode("~", add_special_tokens=False)[0])
    for tag in one.tags.closing_tags:  # as text, which no special token can be
        letters = [encode(letter, add_special_tokens=False)[0] for letter in f"a{tag}b"]
        assert not one.accepts(grammar, [*written[:place], *letters, *written[place + 1 :]])


def test_a_line_break_before_the_end_of_free_text_may_be_left_out() -> None:
    one = model("Qwen3.6")
    for schema, accepted in (({"type": "string"}, True), ({"type": ["string", "null"]}, True), (SHORT, False)):
        parameters = of({"text": schema}, "text")
        text = one.renderer.tokenizer.text(one.written([{"text": "ab"}], parameters)).replace("ab\n", "ab")
        ids = one.renderer.tokenizer.encode(text, add_special_tokens=False)
        assert one.accepts(one.grammar(parameters), ids) == accepted
        assert one.calls(ids, parameters) == [{"text": "ab"}]


def test_patterns_are_searched_as_in_json_schema() -> None:
    one = model("Qwen3.6")
    cases: dict[str, tuple[list[str], list[str]]] = {
        "b+": (["b", "abbc"], ["", "ac"]),
        "^(http|https)://": (["http://x", "https://"], ["xhttp://", "ftp://x"]),
        "x$": (["ax", "x"], ["xa"]),
        "^a|b$": (["ax", "xb"], ["xa", "bx"]),
        "^[^$]$": (["a"], ["$", "ab"]),
    }
    for pattern, (good, bad) in cases.items():
        parameters = of({"text": {"type": "string", "pattern": pattern}}, "text")
        grammar = one.grammar(parameters)
        for text in [*good, *bad]:
            accepted = one.accepts(grammar, one.written([{"text": text}], parameters))
            assert accepted == (text in good), (pattern, text)


@pytest.mark.parametrize("name", DIFFERENT)
def test_nested_strings_may_hold_what_looks_like_the_next_argument(name: str) -> None:
    one = model(name)
    parameters = of({"list": {"type": "array", "items": {"type": "string"}}, "more": {"type": "string"}}, "list")
    encode = one.renderer.tokenizer.encode
    arg = "</arg_value> <arg_key>more</arg_key><arg_value>"
    for following in ("</parameter> <parameter=more>", "</function> <function=f>", "</parameter></function>", arg):
        written = one.written([{"list": ["~"], "more": "b"}], parameters)
        place = written.index(encode("~", add_special_tokens=False)[0])
        letters = [encode(letter, add_special_tokens=False)[0] for letter in f"a{following}]"]
        ids = [*written[:place], *letters, *written[place + 1 :]]
        if one.tags.nested_json:
            assert one.accepts(one.grammar(parameters), ids)
            assert one.calls(ids, parameters) == [{"list": [f"a{following}]"], "more": "b"}]


@pytest.mark.parametrize("name", list(FORMATS))
def test_formats_of_strings(name: str) -> None:
    one = model("Qwen3-Coder")
    examples = {
        "date": "2024-02-29",
        "time": "23:59:01Z",
        "date-time": "2024-02-29T23:59:01.5+02:00",
        "email": "a.b+c@example.co.uk",
        "ipv4": "10.0.255.9",
        "uuid": "123e4567-e89b-12d3-a456-426614174000",
        "uri": "https://example.com/a?b=c#d",
    }
    parameters = of({"text": {"type": "string", "format": name}}, "text")
    grammar = one.grammar(parameters)
    assert one.accepts(grammar, one.written([{"text": examples[name]}], parameters))
    assert not one.accepts(grammar, one.written([{"text": "no 1"}], parameters))


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        (of({"a": {"type": "string", "format": "hostname"}}), ".properties.a", "`format` 'hostname'"),
        (of({"a": {"type": "string", "pattern": "(?=a)"}}), ".properties.a", "look-around"),
        (of({"a": {"type": "string", "pattern": "a(^b|c)"}}), ".properties.a", "`pattern`"),
        (of({"a": {"type": "array", "uniqueItems": True}}), ".properties.a", "uniqueItems"),
        (of({"a": {"not": {"type": "string"}}}), ".properties.a", "`not`"),
        (of({"a": {"oneOf": [SHORT, COLOR]}}), ".properties.a", "oneOf"),
        (of({"a": {"anyOf": [{"enum": ["5"]}, {"type": "integer"}]}}), ".properties.a", "'5'"),
        (of({"a": {"enum": ["</parameter>"]}}), ".properties.a", "</parameter>"),
        (of({"a": {"$ref": "#/properties/b"}, "b": SHORT}), ".properties.a", "refers to #/properties/b"),
        (of({"a": {"type": "array", "items": {"$ref": "#"}}}), ".properties.a", "refers to #"),
        (of({"a": {"type": "string", "minLength": "0}/ <[1]>"}}), ".properties.a", "range"),
        (of({"a": {"anyOf": "x", "type": "string"}}), ".properties.a", "`type`"),
        (of({"a": {"type": "string", "pattern": 5}}), ".properties.a", "not a valid schema"),
        (of({"a": {"type": "string", "maxLength": 5000}}), ".properties.a", "1,000"),
        (of({"a": {"enum": "x", "type": "string"}}), ".properties.a", "`enum`"),
        (of({"a": {"type": [{}]}}), ".properties.a", "`type`"),
        ({"type": "array"}, "", "arguments are an object"),
        (of({"a<b": SHORT}), ".properties.a<b", "angle bracket"),
        (of({"a": SHORT}, additionalProperties=True), "", "names of all properties"),
        (of({"a": SHORT}, minProperties=1), "", "`minProperties`"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(parameters: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        model("Qwen3-Coder").grammar(parameters)
    assert caught.value.param == f"tools.0.function.parameters{param}"
    assert words in caught.value.message
    assert "cannot be enforced" in caught.value.message


def test_a_name_that_the_format_cannot_write_is_refused() -> None:
    for name in ("a b", "a>", '"', "{a}"):
        with pytest.raises(InvalidRequestError) as caught:
            model("Qwen3-Coder").grammar(of({}), strict=False, name=name)
        assert caught.value.param == "tools.0.function.name"


def test_a_function_that_is_not_strict_keeps_the_types_of_such_properties() -> None:
    one = model("Qwen3-Coder")
    parameters = of(
        {"a": {"type": "string", "format": "hostname"}, "b": {"not": {}}, "c": SHORT, "d<": SHORT},
        *("a", "b", "c"),
        additionalProperties=True,
    )
    grammar = one.grammar(parameters, strict=False)
    assert one.accepts(grammar, one.written([{"a": "any", "b": "thing", "c": "abcd"}], parameters))
    assert not one.accepts(grammar, one.written([{"a": "any", "b": "thing", "c": "abcde"}], parameters))
    with pytest.raises(InvalidRequestError, match="names of all properties"):
        one.grammar({"type": "object", "additionalProperties": {"type": "string"}}, strict=False)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, of({})])
def test_a_function_without_parameters_is_called_without_arguments(parameters: Any) -> None:
    for name in DIFFERENT:
        one = model(name)
        ids = one.walk(one.grammar(parameters), 0)
        assert ids is not None
        assert one.calls(ids, parameters) == [{}]
