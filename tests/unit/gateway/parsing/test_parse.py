"""Parsing of answers in the tagged grammar, whole and in pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art.gateway.calls import load_json, make_call
from art.gateway.completion import StopScanner
from art.gateway.parse import Delta, ParsedMessage, TaggedParser, Tags
from art.gateway.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def parse(tokenizer: Tokenizer, text: str, *, in_reasoning: bool = False, parse_tools: bool = True) -> ParsedMessage:
    parser = TaggedParser(tokenizer, Tags.of(tokenizer), in_reasoning=in_reasoning, schemas={} if parse_tools else None)
    parser.push(tokenizer.encode(text, add_special_tokens=False))
    return parser.finish()


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "num_calls"),
    [
        ("hello", "hello", None, 0),
        ("", "", None, 0),
        (" hello \n", " hello \n", None, 0),
        ("<think>\nwhy\n</think>\n\nhello\n", "hello\n", "why", 0),
        ("\n <think>why</think>hello", "hello", "why", 0),
        ("<think>\n\n</think>\n\nhello", "hello", None, 0),
        ("<think>cut o", "", "cut o", 0),
        ("hi <think>x</think> y", "hi <think>x</think> y", None, 0),
        ("<think>a</think>b<think>c</think>", "b<think>c</think>", "a", 0),
        ("x</think>y", "x</think>y", None, 0),
        (CALL, "", None, 1),
        (f"look\n{CALL}\n{CALL}\n", "look", None, 2),
        (f"<think>a</think>\n\n{CALL}", "", "a", 1),
        (f"<think>a {CALL}</think>b", "b", f"a {CALL}", 0),
        ("a\n<tool_call>not json</tool_call> b", "a\n<tool_call>not json</tool_call> b", None, 0),
        ('a\n<tool_call>{"name": "f", "arg', 'a\n<tool_call>{"name": "f", "arg', None, 0),
        (f"{CALL} and so on", " and so on", None, 1),
        ("</tool_call>", "</tool_call>", None, 0),
    ],
)
def test_the_tagged_grammar_is_parsed(
    tokenizer: Tokenizer, text: str, content: str, reasoning: str | None, num_calls: int
) -> None:
    parsed = parse(tokenizer, text)
    assert (parsed.content, parsed.reasoning, len(parsed.tool_calls)) == (content, reasoning, num_calls)


def test_reasoning_that_the_prompt_opened(tokenizer: Tokenizer) -> None:
    parsed = parse(tokenizer, "why\n</think>\n\nhello", in_reasoning=True)
    assert (parsed.content, parsed.reasoning, parsed.reasoning_open) == ("hello", "why", False)
    assert parse(tokenizer, "why", in_reasoning=True).reasoning_open


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<think>" + "x " * 40 + "<|im_start|>assistant\n", False),
    ],
)
def test_whether_a_prompt_opens_reasoning(tokenizer: Tokenizer, prompt: str, inside: bool) -> None:
    assert Tags.of(tokenizer).opens_reasoning(tokenizer.encode(prompt, add_special_tokens=False)) is inside


def test_text_that_looks_like_a_tag_stays_text(tokenizer: Tokenizer) -> None:
    parser = TaggedParser(tokenizer, Tags.of(tokenizer), in_reasoning=False, schemas={})
    letters = [tokenizer.token_id(c) for c in "<think>"]
    parser.push([i for i in letters if i is not None])
    assert parser.finish().content == "<think>"


MAX = "1.7976931348623157e+308"
"""The largest finite number."""


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": 1.0, "b": "\u00e9"}}', '{"a": 1.0, "b": "\u00e9"}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"n": 123456789012345678901234567890}}', '{"n": 123456789012345678901234567890}'),
        ('{"name": "f", "arguments": [1]}', None),
        ('{"name": "f", "arguments": "x"}', None),
        ('{"name": "", "arguments": {}}', None),
        ('{"arguments": {}}', None),
        ('{"name": "f", "arguments": {"a": NaN}}', None),
        ('{"name": "f", "arguments": {"a": Infinity}}', None),
        ('{"name": "f", "arguments": {"a": [6E54001974660, -1e999]}}', f'{{"a": [{MAX}, -{MAX}]}}'),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', None),
        ("[" * 100_000, None),
        ("", None),
        ("[]", None),
    ],
)
def test_tool_call_arguments_must_be_a_json_object(text: str, arguments: str | None) -> None:
    call = make_call(load_json(text))
    assert (None if call is None else call.arguments) == arguments


PIECES = st.sampled_from(
    [
        "hello",
        " ",
        "\n",
        "\u00e9\U0001f642",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f"}',
        CALL,
    ]
)


def _merge(deltas: list[Delta]) -> tuple[str, str, list[Any]]:
    return (
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        [delta.tool_call for delta in deltas if delta.tool_call],
    )


@given(data=st.data(), in_reasoning=st.booleans(), parse_tools=st.booleans())
@settings(max_examples=120, deadline=None)
def test_in_pieces_as_at_once(tokenizer: Tokenizer, data: st.DataObject, in_reasoning: bool, parse_tools: bool) -> None:
    """Property: wherever the answer is cut, the deltas add up to the message, also for bytes that are not UTF-8."""
    text = "".join(data.draw(st.lists(PIECES, max_size=12)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    junk = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6))
    at = data.draw(st.integers(0, len(ids)))
    ids = ids[:at] + junk + ids[at:]
    tags = Tags.of(tokenizer)
    whole = TaggedParser(tokenizer, tags, in_reasoning=in_reasoning, schemas={} if parse_tools else None)
    whole.push(ids)
    expected = whole.finish()
    pieces = TaggedParser(tokenizer, tags, in_reasoning=in_reasoning, schemas={} if parse_tools else None)
    deltas: list[Delta] = []
    position = 0
    while position < len(ids):
        size = data.draw(st.integers(1, 3))
        pieces.push(ids[position : position + size])
        deltas += pieces.take()
        position += size
    assert pieces.finish() == expected
    deltas += pieces.take()
    assert _merge(deltas) == (expected.content, expected.reasoning or "", expected.tool_calls)
    assert Delta() not in deltas


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_the_stop_scanner_agrees_with_a_plain_search(tokenizer: Tokenizer, data: st.DataObject) -> None:
    alphabet = st.text("abEND \u00e9", max_size=12)
    text = data.draw(alphabet)
    stops = data.draw(st.lists(st.text("abEND \u00e9", min_size=1, max_size=4), min_size=1, max_size=3))
    ids = tokenizer.encode(text, add_special_tokens=False)
    scanner = StopScanner(stops, tokenizer.token_bytes)
    released, cut = [], b""
    for token in ids:
        whole, cut = scanner.push([token])
        released += whole
        if scanner.matched is not None:
            break
    matched = scanner.matched is not None
    if not matched:
        released += scanner.finish()
    assert matched == any(stop in text for stop in stops)
    got = (b"".join(tokenizer.token_bytes[i] for i in released) + cut).decode()
    if not matched:
        assert got == text
        return
    # The first token border behind a complete stop string ends the search; of those there, the earliest start counts.
    sizes = [len(tokenizer.token_bytes[i]) for i in ids]
    seen = text.encode()[: sum(sizes[: scanner.num_tokens])]
    before = text.encode()[: sum(sizes[: scanner.num_tokens - 1])]
    assert not any(stop.encode() in before for stop in stops)
    assert got.encode() == seen[: min(seen.find(stop.encode()) for stop in stops if stop.encode() in seen)]
