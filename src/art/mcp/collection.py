"""A list of scenarios for the tools of an MCP server, which can be shown, filtered, split and written to JSON."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, overload

from art.mcp.types import GeneratedScenario
from art.scenarios.written import MAX_DIFFICULTY, MIN_DIFFICULTY, position


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

    def interleave_difficulties(self) -> Self:
        """A copy in which any first part has about the same mix of difficulties as the whole.

        Example: difficulties 1 1 1 1 2 2 become 1 2 1 1 2 1; after `split(3)` both parts have two of 1 and one of 2.
        """
        counts, seen = self.get_difficulty_distribution(), Counter[int]()
        places = []
        for scenario in self.scenarios:
            places.append((seen[scenario.difficulty] + 0.5) / counts[scenario.difficulty])
            seen[scenario.difficulty] += 1
        order = sorted(range(len(places)), key=places.__getitem__)
        return type(self)(self.scenarios[i] for i in order)

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
