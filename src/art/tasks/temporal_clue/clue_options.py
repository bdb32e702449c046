"""The options of `temporal_clue`: how large puzzles are, what is asked, and how clues are written."""

from __future__ import annotations

import random
from typing import Literal

from pydantic import Field, model_validator

from art.task import TaskOptions
from art.tasks.temporal_clue.cast import HOURS, MAX_SIZE, MOTIVES, ROOMS, SUSPECTS, WEAPONS, Cast
from art.tasks.temporal_clue.clues import Statements, Style

Grade = Literal["easy", "medium", "hard"]
MAX_QUESTIONS = 8
MEDIUM = 20
"""Largest number of assumptions of a puzzle that counts as `medium`. About a fifth of the puzzles of four suspects,
rooms, hours, weapons and motives need more."""


class ClueOptions(TaskOptions):
    suspects: int = Field(4, ge=2, le=MAX_SIZE)
    """Number of suspects."""
    rooms: int = Field(4, ge=2, le=MAX_SIZE)
    """Number of rooms."""
    hours: int = Field(4, ge=1, le=MAX_SIZE)
    """Number of hours. With 1, nobody moves."""
    weapons: int = Field(4, ge=0, le=MAX_SIZE)
    """Number of weapons: at least one for each suspect, or 0 for puzzles without weapons."""
    motives: int = Field(4, ge=0, le=MAX_SIZE)
    """Number of motives: at least one for each suspect, or 0 for puzzles without motives."""
    words: int = Field(12, ge=2, le=12)
    """Number of names, rooms, weapons and motives that puzzles draw from."""
    questions: int = Field(5, ge=1, le=MAX_QUESTIONS)
    """Number of questions. Who, what, why, where and when come first, then where somebody was at some hour."""
    statements: Statements = "all"
    """Kinds of clues: plain facts, also denials (what is not so), or all kinds."""
    redundant: int = Field(0, ge=0, le=100)
    """Number of true clues that are added to those that suffice, if there are that many. They make a puzzle easier to
    solve and longer to read."""
    is_shuffled: bool = True
    """Whether clues come in random order. Otherwise they are ordered by kind and then by person, weapon or motive."""
    difficulty: Literal["any", Grade] = "any"
    """Grade of the puzzles."""
    style: Style = "sentences"
    """How clues and questions are written: in sentences or in short."""
    max_completion_tokens: int = Field(2048, ge=8, le=131072)
    """Longest answer in tokens, with all thinking."""

    @model_validator(mode="after")
    def _fits(self) -> ClueOptions:
        for name in ("weapons", "motives"):
            if 0 < (num := getattr(self, name)) < self.suspects:
                raise ValueError(f"`{name}` must be 0 or at least `suspects` ({self.suspects}), got {num}")
        largest = max(self.suspects, self.rooms, self.weapons, self.motives)
        if self.words < largest:
            raise ValueError(f"`words` must be at least {largest} for a puzzle of this size, got {self.words}")
        facts = [self.suspects, self.rooms, self.hours, self.weapons, self.motives]
        possible = sum(num > 1 for num in facts) + (self.suspects + 1) * self.hours
        if self.questions > possible:
            raise ValueError(f"`questions` must be at most {possible} for a puzzle of this size, got {self.questions}")
        return self

    def draw_cast(self, rng: random.Random) -> Cast:
        """Draw the words of a puzzle of this size. The hours follow one another."""
        first = rng.randrange(len(HOURS) - self.hours + 1)
        return Cast(
            suspects=tuple(rng.sample(SUSPECTS[: self.words], self.suspects)),
            rooms=tuple(rng.sample(ROOMS[: self.words], self.rooms)),
            hours=HOURS[first : first + self.hours],
            weapons=tuple(rng.sample(WEAPONS[: self.words], self.weapons)),
            motives=tuple(rng.sample(MOTIVES[: self.words], self.motives)),
        )


def grade_of(num_assumptions: int) -> Grade:
    """Grade a puzzle by the number of assumptions that its proof needs.

    `easy`: for each murderer and hour, the clues contradict each other by plain deduction. `medium`: at most 20 times a
    value has to be assumed and refuted. `hard`: more often.
    """
    return "easy" if not num_assumptions else "medium" if num_assumptions <= MEDIUM else "hard"
