"""A data set as a folder of files that people can read and edit:

    task.toml           description, system prompt, rubric, limits of an answer
    scenarios.jsonl     one scenario a line: {"input": "...", "difficulty": 2, "split": "train"}

Lines can be changed, added and deleted by hand. A line without `split` gets one by its words (`split_of`).
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from art.errors import ConfigError
from art.scenarios.toml_file import read_text, read_toml, write_toml
from art.scenarios.written import (
    SPLITS,
    Split,
    TaskText,
    WrittenScenario,
    first_twin,
    position,
    similarity,
    split_of,
    word_list,
    words_of,
)
from art.storage.atomic import write_file

TASK_FILE, SCENARIOS_FILE = "task.toml", "scenarios.jsonl"

_HEAD = "What an agent should learn. Change what you like."
_COMMENTS = {
    "description": "What the agent should do.",
    "system_prompt": "What the agent is told before each input.",
    "rubric": "Rules by which the judge compares answers to one input.",
    "max_completion_tokens": "Most tokens of an answer; a longer one is cut.",
    "temperature": "Sampling temperature. Training wants 1.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A data set to train on: the texts of a task (system prompt, rubric of the judge) and its scenarios."""

    task: TaskText
    scenarios: list[WrittenScenario]

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read and check a data set's folder.

        Raises:
            ConfigError: a file is not JSON or TOML, or has an unknown key, a value out of range or an input twice. The
                message names file and line.
        """
        folder = Path(folder)
        task = read_toml(folder / TASK_FILE, TaskText)
        return cls(task=task, scenarios=_read_scenarios(folder / SCENARIOS_FILE))

    def save(self, folder: str | Path) -> None:
        """Write `task.toml` and `scenarios.jsonl` to `folder`, and overwrite those that exist."""
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
        """Problems to check before training: little diversity, and inputs that are nearly equal in two splits."""
        diversity = self.diversity()
        return [*(diversity.warnings() if diversity else []), *self._leaks()]

    def summary(self) -> str:
        """The sizes of the splits, the difficulties and the diversity, as lines for people."""
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
        leaks = []
        for name in ("val", "test"):
            twins = [(s, train[twin]) for s in self.split(name) if (twin := first_twin(s.input, seen)) is not None]
            if twins:
                held_out, trained = twins[0]
                leaks.append(
                    f"{len(twins)} of {name} nearly equal one of train, first {held_out.input!r} and "
                    f"{trained.input!r}: {name} then says less about new inputs. Give both the same `split`, or delete "
                    "one"
                )
        return leaks


def _read_scenarios(path: Path) -> list[WrittenScenario]:
    scenarios: list[WrittenScenario] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        scenario = _read_line(line, f"{path}:{number}")
        if (first := lines.setdefault(" ".join(scenario.input.split()), number)) != number:
            raise ConfigError(f"{path}:{number}: the input is in line {first} already: {scenario.input!r}")
        scenarios.append(scenario)
    if not scenarios:
        raise ConfigError(f"{path}:1: there are no scenarios")
    return scenarios


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
        got = "" if first["type"] in ("missing", "extra_forbidden") else f", got {data[key]!r}"
        raise ConfigError(f"{where}: {key}: {what}{got}") from None


LOW_MEAN_DISTANCE = 0.7
LOW_NEAREST_DISTANCE = 0.5
MAX_COMPARED = 1000
"""Most texts that are compared, which takes about a second. A larger set is sampled, with the same result each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diversity:
    """Three measures of how much the texts of a set differ, each from 0 to 1. They are low when texts are alike.

    Distances are Jaccard's, of the words of two texts. Values of sets of 12 to 28 short texts; the bounds
    of warnings lie between the second row and the rest:

        mean  nearest  distinct
        0.93   0.82     0.90    instructions on all subjects (the first seed tasks of Self-Instruct, Wang et al. 2023)
        0.95   0.86     0.97    questions to one shop, written by hand
        0.87   0.07     0.36    eight of these, each three times with a word more
        0.51   0.28     0.29    a name, a thing and what is wrong with it, put into one sentence
        0.29   0.29     0.27    "What is the capital of ...?"
    """

    mean_distance: float
    """Over all pairs; low when all texts follow one template."""
    nearest_distance: float
    """To the most similar other text; low when a few texts are reworded again and again."""
    distinct_bigrams: float
    """Share of different ones among all pairs of neighbouring words: distinct-2 of J. Li et al., "A Diversity-Promoting
    Objective Function for Neural Conversation Models" (NAACL 2016). It also falls with the number and length of the
    texts, so there is no bound for it."""

    def warnings(self) -> list[str]:
        """Say which measures are too low and what to do about it; empty if none is."""
        warnings = []
        if self.mean_distance < LOW_MEAN_DISTANCE:
            warnings.append(
                f"two inputs share {1 - self.mean_distance:.0%} of their words on average: they seem to follow one "
                "template, and what is learnt may not go beyond it. Say in the description which kinds of inputs there "
                "are, or take a stronger generator"
            )
        if self.nearest_distance < LOW_NEAREST_DISTANCE:
            warnings.append(
                f"an input shares {1 - self.nearest_distance:.0%} of its words with the one that is most like it: the "
                "same few inputs come again and again. Ask for fewer, or delete lines"
            )
        return warnings

    def __str__(self) -> str:
        return (
            f"mean distance {self.mean_distance:.2f}, to the nearest {self.nearest_distance:.2f}, distinct bigrams "
            f"{self.distinct_bigrams:.2f}"
        )


def measure_diversity(texts: Sequence[str]) -> Diversity | None:
    """Measure how much the texts of a set differ from each other; `None` for fewer than two."""
    if len(texts) < 2:
        return None
    if len(texts) > MAX_COMPARED:
        texts = sorted(texts, key=position)[:MAX_COMPARED]
    words = [words_of(text) for text in texts]
    nearest = [0.0] * len(words)
    total = 0.0
    for i, a in enumerate(words):
        for j in range(i):
            shared = similarity(a, words[j])
            total += shared
            nearest[i], nearest[j] = max(nearest[i], shared), max(nearest[j], shared)
    bigrams = [pair for text in texts for pair in pairwise(word_list(text))]
    return Diversity(
        mean_distance=1 - total / (len(words) * (len(words) - 1) / 2),
        nearest_distance=1 - statistics.fmean(nearest),
        distinct_bigrams=len(set(bigrams)) / len(bigrams) if bigrams else 0.0,
    )
