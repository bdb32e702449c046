"""What a tiny model's tokenizer makes of a task's words."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from art.task import Conversation
from art.testing.tiny_model import make_tokenizer, render

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess the word",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]
GUESSES = ["cab", "abc", "bca", "aab"]


def guessing(guess: str) -> Conversation:
    feedback = " ".join(f"{letter}+" for letter in guess)
    return Conversation(
        messages=[
            {"role": "system", "content": "Guess a word of three letters."},
            {"role": "user", "content": "begin"},
            {"role": "assistant", "content": guess},
            {"role": "user", "content": feedback},
            {"role": "assistant", "content": guess},
        ]
    )


def calling(guess: str) -> Conversation:
    function = {"name": "guess", "arguments": json.dumps({"word": guess})}
    call: Any = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    return Conversation(messages=[{"role": "user", "content": "begin"}, call], tools=TOOLS)


def tokenizer_of(conversations: list[Conversation], vocab_size: int = 384) -> Any:
    texts = [render(conversation) for conversation in conversations]
    return make_tokenizer(conversations, texts, vocab_size=vocab_size, max_length=512)


def pieces(tokenizer: Any, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text, add_special_tokens=False)]


def test_what_the_assistant_invents_is_spelled() -> None:
    tokenizer = tokenizer_of([guessing(guess) for guess in GUESSES])
    assert pieces(tokenizer, "cab") == ["c", "a", "b"]
    assert pieces(tokenizer, "begin") == ["begin"]


def test_what_the_assistant_copies_stays_whole() -> None:
    conversations = [
        Conversation(messages=[{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}])
        for word in ("opal", "ruby", "jade")
    ]
    tokenizer = tokenizer_of(conversations)
    assert pieces(tokenizer, "opal") == ["opal"]


def test_a_letter_is_the_same_token_everywhere() -> None:
    tokenizer = tokenizer_of([guessing(guess) for guess in GUESSES])
    assert pieces(tokenizer, "c+ a? b-") == ["c", "+", " ", "a", "?", " ", "b", "-"]


def test_prompts_and_the_fixed_part_of_a_call_are_phrases() -> None:
    talk = [calling(guess) for guess in GUESSES]
    tokenizer = tokenizer_of(talk)
    text = render(talk[0])
    answer = text[text.rindex("<tool_call>") : text.rindex("<|im_end|>")]
    assert pieces(tokenizer, answer) == [
        "<tool_call>", "\n", '{"name": "guess", "arguments": {', '"word": ', '"', "c", "a", "b", '"', "}}", "\n",
        "</tool_call>",
    ]  # fmt: skip
    assert json.dumps(TOOLS[0]) in pieces(tokenizer, text)


def test_the_vocabulary_has_its_size_and_special_tokens() -> None:
    tokenizer = tokenizer_of([calling(guess) for guess in GUESSES], vocab_size=270)
    assert len(tokenizer) == 270
    assert pieces(tokenizer, "<|im_start|>user\n") == ["<|im_start|>", "user", "\n"]


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert _TOKENIZER.decode(_TOKENIZER.encode(text, add_special_tokens=False)) == text


_TOKENIZER = tokenizer_of([guessing(guess) for guess in GUESSES])
