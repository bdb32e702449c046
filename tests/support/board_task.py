"""A task with options of every type, whose rollouts no test runs."""

from __future__ import annotations

import random
from typing import Any, ClassVar, Literal

from pydantic import Field

from art.task import Conversation, Scenario, Split, Task, TaskOptions
from art.trajectory import Trajectory


class BoardOptions(TaskOptions):
    size: int = Field(default=4, ge=2, le=6)
    """Cells on each side
    of the board."""
    form: Literal["xml", "tool"] = "xml"
    """How a move is written."""
    chance: float = Field(default=0.1, ge=0, le=1)
    """Chance of a 4."""
    shows_history: bool = True
    """Whether earlier moves are shown."""
    words: tuple[str, ...] = ()
    """Words to use."""
    goal: int | None = None
    """Tile that wins; null for none."""
    level: Literal[1, 2, 3] = 1
    """How hard it is."""
    place: str = ""
    """A file."""


class BoardTask(Task):
    name: ClassVar[str] = "board"
    description: ClassVar[str] = "a board"
    options_class = BoardOptions
    options: BoardOptions
    tiny_options: ClassVar[dict[str, Any]] = {"size": 3, "form": "tool"}
    rubric: ClassVar[str | None] = "A full board is best."

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        return [self.scenario(split, seed, index, {"size": self.options.size}) for index in range(count)]

    async def rollout(self, model: Any, scenario: Scenario, **how: Any) -> Trajectory:
        raise NotImplementedError

    def play(self, rng: random.Random, skill: float) -> Conversation:
        shown = {"role": "user", "content": "." * self.options.size}
        return Conversation(messages=[shown, {"role": "assistant", "content": "x"}])  # type: ignore[list-item]

    def score_messages(self, messages: list[dict[str, Any]]) -> float:
        return len(messages[-1]["content"]) / self.options.size
