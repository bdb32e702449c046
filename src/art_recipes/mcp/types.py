"""Tools and resources of an MCP server, and scenarios for them, alone and as a list."""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self, overload

from art_recipes.scenarios.written import MAX_DIFFICULTY, MIN_DIFFICULTY, position


@dataclass
class _FromDict:
    """Conversion of a dataclass to a dict and back."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Make an object from a mapping of its fields.

        Raises:
            ValueError: a field is missing or unknown.
        """
        try:
            return cls(**data)
        except TypeError:
            keys = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            names = list(inspect.signature(cls).parameters)
            raise ValueError(f"{cls.__name__} has the fields {names}, got {keys}") from None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class MCPTool(_FromDict):
    """A tool that an MCP server offers."""

    name: str
    description: str
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments."""

    def to_tool_schema(self) -> dict[str, Any]:
        """The tool in the format of OpenAI's `tools=`."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass
class MCPResource(_FromDict):
    """A resource that an MCP server offers."""

    uri: str
    name: str
    description: str
    mime_type: str | None = None


@dataclass
class GeneratedScenario(_FromDict):
    """A scenario: a task for an agent that uses the tools of an MCP server, with its difficulty."""

    task: str
    """What the agent is told to do."""
    difficulty: int
    """Difficulty from 1 (one call) to 5 (many calls that depend on each other)."""

    def __post_init__(self) -> None:
        if isinstance(self.difficulty, bool) or self.difficulty not in range(MIN_DIFFICULTY, MAX_DIFFICULTY + 1):
            raise ValueError(
                f"difficulty must be a whole number from {MIN_DIFFICULTY} to {MAX_DIFFICULTY}, got {self.difficulty!r}"
            )

    def preview(self, max_length: int = 120) -> str:
        """The task, cut to `max_length` characters."""
        return self.task if len(self.task) <= max_length else self.task[: max(0, max_length - 3)] + "..."


complete_task_tool: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "complete_task",
        "description": "Say that the task is done, or that it cannot be done. Nothing can be done after it.",
        "parameters": {
            "type": "object",
            "properties": {
                "summary": {"type": "string", "description": "What was done, and the answer if there is one."}
            },
            "required": ["summary"],
        },
    },
}


class GeneratedScenarioCollection(Sequence[GeneratedScenario]):
    """An immutable sequence of scenarios for the tools of an MCP server, with methods to select, split and store."""

    def __init__(self, scenarios: Iterable[GeneratedScenario] = ()) -> None:
        self.scenarios = list(scenarios)

    @classmethod
    def from_dicts(cls, data: Iterable[Mapping[str, Any]]) -> Self:
        return cls(GeneratedScenario.from_dict(item) for item in data)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote, or `{"scenarios": [...]}`."""
        data = json.loads(text)
        data = data.get("scenarios") if isinstance(data, dict) else data
        if not isinstance(data, list):
            raise ValueError('expected a JSON list of {"task": ..., "difficulty": ...}')
        return cls.from_dicts(data)

    def to_dicts(self) -> list[dict[str, Any]]:
        return [scenario.to_dict() for scenario in self.scenarios]

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dicts(), indent=indent, ensure_ascii=False)

    def shuffle(self, seed: int | None = None) -> Self:
        """Return a copy in random order; the same seed gives the same order."""
        return type(self)(random.Random(seed).sample(self.scenarios, len(self.scenarios)))

    def split(self, train_size: int) -> tuple[Self, Self]:
        """The first `train_size` scenarios, and the rest."""
        if not 0 <= train_size <= len(self):
            raise ValueError(f"train_size must be from 0 to {len(self)}, the number of scenarios; got {train_size}")
        return type(self)(self.scenarios[:train_size]), type(self)(self.scenarios[train_size:])

    def split_by_hash(self, val_fraction: float = 0.2) -> tuple[Self, Self]:
        """Divide the scenarios into those to train on and those to validate with, by a hash of each task's words.

        A task keeps its side when scenarios are added, removed or shuffled, and tasks that differ only in case and
        punctuation are on one side. The shares are right on average, so they can be a few off in a small collection.
        """
        if not 0 <= val_fraction <= 1:
            raise ValueError(f"val_fraction must be from 0 to 1, got {val_fraction}")
        train = [s for s in self.scenarios if position(s.task) >= val_fraction]
        return type(self)(train), type(self)(s for s in self.scenarios if position(s.task) < val_fraction)

    def filter_by_difficulty(self, min_difficulty: int = MIN_DIFFICULTY, max_difficulty: int = MAX_DIFFICULTY) -> Self:
        """The scenarios whose difficulty is in the range, both ends included."""
        return type(self)(s for s in self.scenarios if min_difficulty <= s.difficulty <= max_difficulty)

    def get_difficulty_distribution(self) -> Counter[int]:
        return Counter(scenario.difficulty for scenario in self.scenarios)

    def preview(self, n: int = 5, max_task_length: int = 120) -> None:
        """Print the first `n` scenarios."""
        for number, scenario in enumerate(self.scenarios[:n], 1):
            sys.stdout.write(f"{number}. {scenario.preview(max_task_length)} (difficulty {scenario.difficulty})\n")

    def print_difficulty_distribution(self) -> None:
        for difficulty, count in sorted(self.get_difficulty_distribution().items()):
            sys.stdout.write(f"difficulty {difficulty}: {count:3} {'#' * count}\n")

    def get_summary(self) -> dict[str, Any]:
        """Numbers by name: `total_scenarios`, `difficulty_distribution`, `avg_difficulty`, `avg_task_length`."""
        total = len(self)
        return {
            "total_scenarios": total,
            "difficulty_distribution": dict(sorted(self.get_difficulty_distribution().items())),
            "avg_difficulty": sum(s.difficulty for s in self.scenarios) / total if total else 0.0,
            "avg_task_length": sum(len(s.task) for s in self.scenarios) / total if total else 0.0,
        }

    @overload
    def __getitem__(self, index: int) -> GeneratedScenario: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> GeneratedScenario | Self:
        return type(self)(self.scenarios[index]) if isinstance(index, slice) else self.scenarios[index]

    def __len__(self) -> int:
        return len(self.scenarios)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} scenarios)"
