"""The parts of a data set: the texts that all its scenarios share, and scenarios with difficulty and split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from art.rewards.ruler import DEFAULT_RUBRIC

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

MIN_DIFFICULTY, MAX_DIFFICULTY = 1, 5
TEST_SHARE, VAL_SHARE = 0.2, 0.1
"""Shares of the scenarios in the splits `test` and `val`; the rest is for training."""


class TaskText(BaseModel):
    """The texts and sampling settings that all scenarios of a data set share; stored as `task.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: Text
    """What the agent should do, in one sentence. Only people and the generator read it."""
    system_prompt: Text
    """What the agent is told before each input."""
    rubric: Text = DEFAULT_RUBRIC
    """Rules by which the judge compares answers to one input."""
    max_completion_tokens: int = Field(default=1024, ge=1)
    """Most tokens of an answer; a longer one is cut."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature. Training wants 1, because answers to compare must differ."""


class WrittenScenario(BaseModel):
    """One scenario of a data set: a user's input, with difficulty and split; stored as a line of `scenarios.jsonl`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: Text
    """What the user says."""
    difficulty: int | None = Field(default=None, ge=MIN_DIFFICULTY, le=MAX_DIFFICULTY, strict=True)
    """Difficulty from 1 (easy) to 5, as its author sees it."""
    split: Split | None = None
    """Split of the scenario; `None` derives it from the words (`split_of`)."""


def split_of(scenario: WrittenScenario) -> Split:
    """The split of a scenario: the one that it names, or else one derived from a hash of its words.

    Adding or removing scenarios moves no other one, and inputs that differ only in case and punctuation are never in
    two splits. The shares are right on average.
    """
    if scenario.split is not None:
        return scenario.split
    place = position(scenario.input)
    if place < TEST_SHARE:
        return "test"
    return "val" if place < TEST_SHARE + VAL_SHARE else "train"


def with_splits(scenarios: Iterable[WrittenScenario]) -> list[WrittenScenario]:
    """Return scenarios with `split` filled in, so that editing the words of one does not move it to another split.

    By chance a small set can have nothing to train on or to test with. Then the scenario whose hash is closest moves
    to that split.
    """
    placed = [scenario.model_copy(update={"split": split_of(scenario)}) for scenario in scenarios]
    by_place = sorted(range(len(placed)), key=lambda i: position(placed[i].input))
    edges: tuple[tuple[Split, int], ...] = (("test", 0), ("train", -1))
    for split, edge in edges:
        if len(placed) > 1 and all(scenario.split != split for scenario in placed):
            nearest = by_place[edge]
            placed[nearest] = placed[nearest].model_copy(update={"split": split})
    return placed


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
