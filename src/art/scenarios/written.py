"""One scenario as it stands in a file: an input, how hard it is, and which split it belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from art.scenarios.words import position

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

MIN_DIFFICULTY, MAX_DIFFICULTY = 1, 5
TEST_SHARE, VAL_SHARE = 0.2, 0.1
"""Of the scenarios; the rest is for training."""


class WrittenScenario(BaseModel):
    """One line of `scenarios.jsonl`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    """What the user says."""
    difficulty: int | None = Field(default=None, ge=MIN_DIFFICULTY, le=MAX_DIFFICULTY, strict=True)
    """From 1 (easy) to 5, in the eyes of whoever wrote it."""
    split: Split | None = None
    """Where it belongs. `None` leaves it to its words (`split_of`)."""


def split_of(scenario: WrittenScenario) -> Split:
    """The split that a scenario names, or else the one that its words fall into.

    It depends on nothing but the scenario, so all others stay where they are when some are added or removed, and two
    inputs that differ in case and punctuation only are never in two splits. The shares are right on average.
    """
    if scenario.split is not None:
        return scenario.split
    place = position(scenario.input)
    if place < TEST_SHARE:
        return "test"
    return "val" if place < TEST_SHARE + VAL_SHARE else "train"


def with_splits(scenarios: Iterable[WrittenScenario]) -> list[WrittenScenario]:
    """The same scenarios with their splits written out, so that each stays in its own when its words are edited.

    By chance a small set can leave nothing to train on or to test with. Then the scenario whose place is nearest goes
    there.
    """
    placed = [scenario.model_copy(update={"split": split_of(scenario)}) for scenario in scenarios]
    by_place = sorted(range(len(placed)), key=lambda i: position(placed[i].input))
    edges: tuple[tuple[Split, int], ...] = (("test", 0), ("train", -1))
    for split, edge in edges:
        if len(placed) > 1 and all(scenario.split != split for scenario in placed):
            nearest = by_place[edge]
            placed[nearest] = placed[nearest].model_copy(update={"split": split})
    return placed
