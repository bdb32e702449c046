"""A small vocabulary that can write JSON, and a grammar for it."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from art.kernels.grammar import Mask, num_words

ADDED = ("<end>", "<other_end>", "<call>")
STOPS = (0, 1)
"""Ids of `<end>` and `<other_end>`."""
FORM = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 33]}, "text": {"type": "string", "maxLength": 5}},
    "required": ["n", "text"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = f"start: %json {json.dumps(FORM)}"


def make_tokenizer() -> Tokenizer:
    """106 tokens: three added ones, the printable characters of ASCII, and some longer ones."""
    characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = [characters.pre_tokenize_str(c)[0][0] for c in string.printable[:95] + "\n"]
    pairs = [("{", '"'), ("3", "3"), ('"', ":"), ("a", "b"), ('"', "}"), ("t", "e"), ("te", "xt")]
    pairs = [*pairs[:-1], ("x", "t"), pairs[-1]]
    vocabulary = list(ADDED) + letters
    vocabulary += [a + b for a, b in pairs]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = characters
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in ADDED])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    make_tokenizer().save(str(folder / "tokenizer.json"))


def check_answer(text: str) -> None:
    """Check that `text` is an object of `FORM`."""
    answer = json.loads(text)
    assert [*answer] == ["n", "text"]
    assert answer["n"] in (1, 2, 33)
    assert len(answer["text"]) <= 5


def mask_of(token_ids: Sequence[int], vocab_size: int) -> Mask:
    """The mask that allows exactly `token_ids`."""
    bits = np.zeros(num_words(vocab_size) * 32, dtype=np.uint8)
    bits[np.asarray(token_ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
