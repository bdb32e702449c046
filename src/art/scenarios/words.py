"""Texts as sets of words: when two are the same, how far apart they are, and where a text falls in a split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

Words = frozenset[str]

MAX_SIMILARITY = 0.8
"""Two texts are the same if this share of the words that either has is in both (Jaccard index)."""


def words_of(text: str) -> Words:
    """The words of a text without case and punctuation: what two wordings of one text have in common."""
    return frozenset(word_list(text))


def word_list(text: str) -> list[str]:
    """The same in their order, repetitions included."""
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def similarity(a: Words, b: Words) -> float:
    """The Jaccard index: the share of the words of either that both have; 1 for two texts without words.

    P. Jaccard, "The distribution of the flora in the alpine zone", New Phytologist 11 (1912).
    """
    return len(a & b) / len(a | b) if a or b else 1.0


def first_twin(text: str, others: Sequence[Words]) -> int | None:
    """The index of the first of `others` that is the same as `text`; `None` if it differs from all."""
    words = words_of(text)
    return next((i for i, other in enumerate(others) if similarity(words, other) >= MAX_SIMILARITY), None)


def without_twins(texts: Iterable[str], known: Iterable[str] = ()) -> list[int]:
    """The indices of those of `texts` that differ from all of `known` and from each other."""
    seen = [words_of(text) for text in known]
    kept = []
    for index, text in enumerate(texts):
        if first_twin(text, seen) is None:
            seen.append(words_of(text))
            kept.append(index)
    return kept


def position(text: str) -> float:
    """A number from 0 to 1 that looks random and follows from the text's words, whatever their order and case."""
    digest = hashlib.sha256(" ".join(sorted(words_of(text))).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
