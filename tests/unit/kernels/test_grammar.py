"""Grammars: masks, replay, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from art.errors import ConfigError, InvalidRequestError
from art.kernels.grammar import (
    MAX_CACHED,
    MAX_GRAMMAR_CHARS,
    Mask,
    Vocabulary,
    allowed_bits,
    allowed_ids,
    num_words,
)
from tests.support.grammars import mask_of

VOCAB = 320  # more than the tokenizer has, as many models
NUMBER = (
    'start: %json {"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'
)


def make_tokenizer() -> Tokenizer:
    """256 bytes, a few longer tokens, and six added ones."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [("a", "b"), ("ab", "c"), ('"', "a")]
    letters |= {a + b: len(letters) + i for i, (a, b) in enumerate(pairs)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in ("<tool_call>", "</tool_call>", "</think>")])
    return tokenizer


TOKENIZER = make_tokenizer()
ADDED = {name: TOKENIZER.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>")}
END, OTHER_END = ADDED["<|im_end|>"], ADDED["<|endoftext|>"]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENIZER.to_str(), VOCAB)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def mask(vocabulary: Vocabulary, grammar: str, text: str = "", stops: tuple[int, ...] = (END,)) -> set[int]:
    """The tokens that may follow `text`."""
    matcher = vocabulary.matcher(grammar, stops)
    matcher.resume(ids(text))
    row = np.full(vocabulary.num_words, 0xFFFFFFFF, dtype=np.uint32)
    matcher.fill(row)
    return set(allowed_ids(row, VOCAB).tolist())


def test_a_mask_allows_what_the_grammar_allows_next(vocabulary: Vocabulary) -> None:
    grammar = 'start: "abc" | "b"'
    assert mask(vocabulary, grammar) == {*ids("a"), *ids("ab"), *ids("abc"), *ids("b")}
    assert mask(vocabulary, grammar, "ab") == set(ids("c"))
    assert mask(vocabulary, grammar, "abc") == {END}


def test_every_stop_token_may_end_an_answer_and_only_where_it_is_complete(vocabulary: Vocabulary) -> None:
    grammar = "start: /[a-b]{1,2}/"
    both = (END, OTHER_END)
    assert not mask(vocabulary, grammar, stops=both) & set(both)
    assert mask(vocabulary, grammar, "a", stops=both) == {*ids("a"), *ids("b"), *both}
    assert mask(vocabulary, grammar, "a") == {*ids("a"), *ids("b"), END}
    assert mask(vocabulary, 'start: ""') == {END}


def test_added_tokens_come_only_where_the_grammar_names_them(vocabulary: Vocabulary) -> None:
    inside = mask(vocabulary, 'start: %json {"type": "string"}', '"a')
    assert set(ids("bcd<>|")) <= inside
    assert not inside & set(range(TOKENIZER.token_to_id("<|im_start|>"), VOCAB))
    named = 'start: <tool_call> "a"'
    assert mask(vocabulary, named) == {ADDED["<tool_call>"]}


def test_a_replay_gives_the_masks_of_sampling(vocabulary: Vocabulary) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        matcher = vocabulary.matcher(NUMBER, (END,))
        masks: list[Mask] = []
        tokens: list[int] = []
        while len(tokens) < 40 and END not in tokens:
            row = np.zeros(vocabulary.num_words, dtype=np.uint32)
            matcher.fill(row)
            token = int(rng.choice(allowed_ids(row, VOCAB)))
            assert matcher.advance(token)
            masks.append(row)
            tokens.append(token)
        for cut in (len(tokens), 3):
            replay = vocabulary.replay(NUMBER, (END,), tokens[:cut])
            assert replay.num_matched == cut
            assert (replay.masks[replay.index] == np.array(masks[:cut])).all()
            assert len(np.unique(replay.masks, axis=0)) == len(replay.masks)


def test_a_replay_is_bit_equal_in_another_process(vocabulary: Vocabulary, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_str())
    tokens = [*ids('{"a":-12.3'), END]
    code = (
        "import sys; from art.kernels.grammar import Vocabulary; "
        f"r = Vocabulary.load({str(tmp_path)!r}, {VOCAB}).replay({NUMBER!r}, ({END},), {tokens}); "
        "print(r.masks.tobytes().hex(), r.index.tolist(), 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    replay = vocabulary.replay(NUMBER, (END,), tokens)
    assert answer == f"{replay.masks.tobytes().hex()} {replay.index.tolist()} False"


def test_a_token_outside_its_mask_ends_the_replay(vocabulary: Vocabulary) -> None:
    tokens = ids('{"a":1x}')
    replay = vocabulary.replay(NUMBER, (END,), tokens)
    assert replay.num_matched == len(replay.index) == len(ids('{"a":1'))
    assert vocabulary.replay(NUMBER, (END,), [VOCAB + 5]).num_matched == 0


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        ("start: /(?=a)b/", "look-around"),
        ('start: "a', "lexer error"),
        ('nope: "a"', "no start rule"),
        ("", "no start rule"),
        ('start: %json {"type": "nope"}', "nope"),
        ("start: <no_such_token>", "no_such_token"),
        ("start: " + '"a" ' * MAX_GRAMMAR_CHARS, "at most"),
    ],
)
def test_a_grammar_that_is_not_one_is_refused_with_the_reason(
    vocabulary: Vocabulary, grammar: str, complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as caught:
        vocabulary.matcher(grammar, (END,))
    assert caught.value.param == "grammar"
    assert len(caught.value.message) < 1_000


def test_a_grammar_needs_a_stop_token(vocabulary: Vocabulary) -> None:
    for stops in ((), (VOCAB,)):
        with pytest.raises(InvalidRequestError, match="at least one stop token"):
            vocabulary.matcher('start: "a"', stops)


def test_an_answer_that_the_vocabulary_cannot_continue_ends_there() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>")])
    small = Vocabulary(tokenizer.to_str(), 3)
    matcher = small.matcher('start: "a" "c"', (2,))
    assert matcher.advance(0)
    assert not matcher.advance(2)
    with pytest.raises(InvalidRequestError, match="cannot be continued at token 1"):
        matcher.fill(np.zeros(1, dtype=np.uint32))
    assert small.replay('start: "a" "c"', (2,), [0, 2]).num_matched == 1


def test_tokens_drawn_before_must_match(vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be continued at token 0"):
        vocabulary.matcher('start: "abc"', (END,)).resume(ids("b"))


def test_compiled_grammars_are_kept_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile(tokenizer: object, text: str, **options: object) -> object:
        compiled.append(text)
        return LLMatcher(tokenizer, text, **options)

    monkeypatch.setattr("art.kernels.grammar.LLMatcher", compile)
    fresh = Vocabulary(TOKENIZER.to_str(), VOCAB)
    fresh.matcher(NUMBER, (END,)).resume(ids('{"a'))
    assert fresh.matcher(NUMBER, (END,)).num_tokens == 0  # a copy at the beginning, whatever the other has drawn
    assert len(compiled) == 1
    for number in range(MAX_CACHED):
        fresh.matcher(f'start: "{number}"', (END,))
    fresh.matcher(NUMBER, (END,))
    assert len(compiled) == MAX_CACHED + 2


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no readable tokenizer\.json"):
        Vocabulary.load(str(tmp_path), VOCAB)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot use this tokenizer"):
        Vocabulary.load(str(tmp_path), VOCAB)
    with pytest.raises(ConfigError, match="100"):
        Vocabulary(TOKENIZER.to_str(), 100)


def test_masks_and_ids_are_two_forms_of_one_thing() -> None:
    chosen = [0, 31, 32, 63, 318, 319]
    row = mask_of(chosen, VOCAB)
    assert row.dtype == np.uint32
    assert len(row) == num_words(VOCAB) == 10
    assert allowed_ids(row, VOCAB).tolist() == chosen
    assert np.flatnonzero(allowed_bits(row, VOCAB)).tolist() == chosen
