"""Texts as sets of words: whether two count as equal, how far apart they are, and which split a text falls into."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

Words = frozenset[str]

MAX_SIMILARITY = 0.8
"""Two texts count as equal if the Jaccard index of their words is at least this."""


def words_of(text: str) -> Words:
    """The set of a text's words, without case and punctuation."""
    return frozenset(word_list(text))


def word_list(text: str) -> list[str]:
    """The words of a text in order, without case and punctuation."""
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def similarity(a: Words, b: Words) -> float:
    """The Jaccard index: words that both have, over words that either has; 1 for two texts without words.

    P. Jaccard, "The distribution of the flora in the alpine zone", New Phytologist 11 (1912).
    """
    return len(a & b) / len(a | b) if a or b else 1.0


def first_twin(text: str, others: Sequence[Words]) -> int | None:
    """Index of the first of `others` that counts as equal to `text`; `None` if it differs from all."""
    words = words_of(text)
    return next((i for i, other in enumerate(others) if similarity(words, other) >= MAX_SIMILARITY), None)


def without_twins(texts: Iterable[str], known: Iterable[str] = ()) -> list[int]:
    """Indices of the `texts` that differ from all of `known` and from each other. The first of equal ones is kept."""
    seen = [words_of(text) for text in known]
    kept = []
    for index, text in enumerate(texts):
        if first_twin(text, seen) is None:
            seen.append(words_of(text))
            kept.append(index)
    return kept


def position(text: str) -> float:
    """A pseudo-random number from 0 to 1, from a hash of the set of the text's words."""
    digest = hashlib.sha256(" ".join(sorted(words_of(text))).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
