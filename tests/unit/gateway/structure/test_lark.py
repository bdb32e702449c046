"""Text becomes Lark that matches exactly this text, whatever it contains; special tokens are never text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art.gateway import grammar as lark
from art.kernels.grammar import Vocabulary
from tests.support.grammars import make_tokenizer

END = 0
BACKEND = make_tokenizer()
VOCABULARY = Vocabulary(BACKEND.to_str(), 128)
CHARACTERS = st.sampled_from([c for c in map(chr, range(32, 127))] + ["\n"])


def matches(grammar: str, text: str) -> bool:
    matcher = VOCABULARY.matcher(grammar, (END,))
    return all(map(matcher.advance, [*BACKEND.encode(text).ids, END]))


@given(st.text(CHARACTERS, min_size=1, max_size=30), st.text(CHARACTERS, max_size=5))
@settings(max_examples=80, deadline=None)
def test_a_literal_matches_itself_only(text: str, more: str) -> None:
    if any(name in text for name in ("<end>", "<call>", "<other_end>")):
        return
    grammar = f"start: {lark.literal(text)}"
    assert matches(grammar, text)
    assert matches(grammar, text + more) == (not more)


@given(st.lists(st.text(CHARACTERS, min_size=1, max_size=8), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_a_choice_matches_each_of_its_texts(texts: list[str]) -> None:
    grammar = f"start: {lark.choice(texts)}"
    for text in texts:
        if "<end>" not in text and "<call>" not in text:
            assert matches(grammar, text)


@pytest.mark.parametrize("text", ["\x7f", "\u2028", "\u00e9\U0001f642", "\t\r\x00", "}\n}", "%json {", "//"])
def test_unusual_characters_are_valid_literals(text: str) -> None:
    VOCABULARY.matcher(f"start: {lark.literal(text)}", (END,))
    VOCABULARY.matcher(f"start: {lark.regex(re.escape(text))}", (END,))


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("^a+$", "aa", True),
        ("a/b", "a/b", True),
        (r"a\/b", "a/b", True),
        ("[/]", "/", True),
        ("a\nb", "a\nb", True),
        ("yes|no", "no", True),
        ("yes|no", "yess", False),
        (r"\d{2}", "12", True),
        ("<call>", "<cal", False),
    ],
)
def test_regular_expressions(pattern: str, text: str, expected: bool) -> None:
    assert matches(f"start: {lark.regex(pattern)}", text) == expected


def test_a_special_token_that_looks_like_text_is_not_text() -> None:
    grammar = f"start: {lark.literal('<call>')}"
    matcher = VOCABULARY.matcher(grammar, (END,))
    assert not matcher.advance(BACKEND.token_to_id("<call>"))
    assert matches(f"start: {lark.piece(BACKEND.token_to_id('<call>'))}", "<call>")
