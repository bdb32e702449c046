"""A data set that people can read and edit, as a folder:

    task.toml           description, system prompt, rubric, limits of an answer
    scenarios.jsonl     one scenario a line: {"input": "...", "difficulty": 2, "split": "train"}

Lines can be changed, added and deleted by hand. A line without `split` goes where its words fall (`split_of`).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from art.errors import ConfigError
from art.scenarios.diversity import Diversity, measure_diversity
from art.scenarios.task_text import TaskText
from art.scenarios.toml_file import read_text, read_toml, write_toml
from art.scenarios.words import first_twin, words_of
from art.scenarios.written import SPLITS, Split, WrittenScenario, split_of
from art.storage.atomic import write_file

TASK_FILE, SCENARIOS_FILE = "task.toml", "scenarios.jsonl"

_HEAD = "What an agent is to learn. Change what you like."
_COMMENTS = {
    "description": "What the agent should do.",
    "system_prompt": "What the agent is told before each input.",
    "rubric": "By what the judge compares answers to one input.",
    "max_completion_tokens": "Of an answer; a longer one is cut.",
    "temperature": "Of sampling. Training wants 1.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    task: TaskText
    scenarios: list[WrittenScenario]

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read and check a folder.

        Raises:
            ConfigError: names file and line, and says what is wrong there: no JSON or TOML, an unknown key, a value
                that is out of range, an input that is there twice.
        """
        folder = Path(folder)
        task = read_toml(folder / TASK_FILE, TaskText)
        return cls(task=task, scenarios=_read_scenarios(folder / SCENARIOS_FILE))

    def save(self, folder: str | Path) -> None:
        """Write both files over what is there."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / TASK_FILE, write_toml(self.task.model_dump(), _COMMENTS, head=_HEAD).encode())
        lines = (scenario.model_dump(exclude_none=True) for scenario in self.scenarios)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_file(folder / SCENARIOS_FILE, text.encode())

    def split(self, name: Split) -> list[WrittenScenario]:
        return [scenario for scenario in self.scenarios if split_of(scenario) == name]

    def diversity(self) -> Diversity | None:
        return measure_diversity([scenario.input for scenario in self.scenarios])

    def warnings(self) -> list[str]:
        """What should be looked at before training: little diversity, and inputs that are nearly in two splits."""
        diversity = self.diversity()
        return [*(diversity.warnings() if diversity else []), *self._leaks()]

    def summary(self) -> str:
        """Lines for people: sizes, difficulties, diversity."""
        sizes = ", ".join(f"{len(self.split(name))} {name}" for name in SPLITS)
        levels = Counter(scenario.difficulty for scenario in self.scenarios if scenario.difficulty is not None)
        lines = [f"{len(self.scenarios)} scenarios: {sizes}"]
        if levels:
            lines.append("difficulty: " + ", ".join(f"{count} of {level}" for level, count in sorted(levels.items())))
        diversity = self.diversity()
        return "\n".join([*lines, *([f"diversity: {diversity}"] if diversity else [])])

    def _leaks(self) -> list[str]:
        train = self.split("train")
        seen = [words_of(scenario.input) for scenario in train]
        found = []
        for name in ("val", "test"):
            twins = [(s, train[twin]) for s in self.split(name) if (twin := first_twin(s.input, seen)) is not None]
            if twins:
                held_out, trained = twins[0]
                found.append(
                    f"{len(twins)} of {name} nearly equal one of train, first {held_out.input!r} and "
                    f"{trained.input!r}: {name} then says less about new inputs. Give both the same `split`, or delete "
                    "one"
                )
        return found


def _read_scenarios(path: Path) -> list[WrittenScenario]:
    found: list[WrittenScenario] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        scenario = _read_line(line, f"{path}:{number}")
        if (first := lines.setdefault(" ".join(scenario.input.split()), number)) != number:
            raise ConfigError(f"{path}:{number}: the input stands in line {first} already: {scenario.input!r}")
        found.append(scenario)
    if not found:
        raise ConfigError(f"{path}:1: there are no scenarios")
    return found


def _read_line(line: str, where: str) -> WrittenScenario:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: this is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f'{where}: expected an object like {{"input": "..."}}, got {line.strip()[:80]}')
    try:
        return WrittenScenario.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        known = ", ".join(WrittenScenario.model_fields)
        what = f"unknown; there are {known}" if first["type"] == "extra_forbidden" else first["msg"]
        given = "" if first["type"] in ("missing", "extra_forbidden") else f", got {data[key]!r}"
        raise ConfigError(f"{where}: {key}: {what}{given}") from None
