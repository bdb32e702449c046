"""The rollouts of a comparison, one file of JSON lines per model. What is in it is not made again."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art.recipes.comparing.call_sums import CallSums
from art.storage.jsonl import append_lines, read_lines
from art.task import Scenario, Task

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


class KeptRollout(BaseModel):
    """One rollout as it is kept: its score or its error, its requests and its conversation."""

    model_config = ConfigDict(extra="forbid")

    scenario: str
    """Id of the scenario, and a hash of its content and of the task's code."""
    index: int
    """Number of the rollout among those of its scenario."""
    started_at: float
    """Seconds since the epoch."""
    seconds: float
    error: str | None = None
    """Why there is no score; `None` if there is one."""
    reward: float | None = None
    headline: float | None = None
    is_policy_fault: bool = False
    num_turns: int = 0
    """Answers of the model in the rollout."""
    calls: CallSums | None = None
    """`None` for a model whose requests do not go over HTTP."""
    trajectory: dict[str, Any] = Field(default_factory=dict)
    """The rollout, as the log of a training has it."""

    @property
    def place(self) -> tuple[str, int]:
        return self.scenario, self.index


class KeptRollouts:
    """The rollouts of one model in a comparison's folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = [row for _, content in read_lines(path) if (row := _parsed(content)) is not None]

    def add(self, row: KeptRollout) -> None:
        """Append a rollout to the file, and return when it is on disk."""
        append_lines(self._path, [row.model_dump(mode="json")])
        self._rows.append(row)

    def of(self, scenarios: Iterable[str], rollouts: int) -> list[KeptRollout]:
        """Return what was tried for these scenarios, failures included, in the order in which it ended."""
        names = set(scenarios)
        return [row for row in self._rows if row.scenario in names and row.index < rollouts]


def scored(rows: Iterable[KeptRollout]) -> dict[tuple[str, int], KeptRollout]:
    """Return the rollouts that have a score, by scenario and index."""
    return {row.place: row for row in rows if row.error is None}


def file_of(folder: Path, label: str, identity: str) -> Path:
    """Return the file of a model's rollouts. A model that is asked in another way has another file."""
    digest = hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()
    return folder / "rollouts" / f"{_NOT_IN_NAMES.sub('-', label)[:60].strip('-.')}-{digest}.jsonl"


def scenario_names(task: Task, scenarios: Iterable[Scenario]) -> list[str]:
    """Name scenarios by their id and a hash of their content, and of the file that has the task's code.

    A rollout that was made with other rules or another reward is therefore not taken for one of these.
    """
    code = _source(task)
    names = []
    for scenario in scenarios:
        digest = hashlib.blake2b(f"{code}{scenario.model_dump_json()}".encode(), digest_size=6).hexdigest()
        names.append(f"{scenario.id}#{digest}")
    return names


def _source(task: Task) -> str:
    try:
        path = Path(inspect.getfile(type(task)))
    except (TypeError, OSError):  # a class of a notebook or of an interactive session
        return type(task).__qualname__
    is_folder = (path.parent / "__init__.py").is_file() and path.stem.endswith("task")
    files = sorted(path.parent.glob("*.py")) if is_folder else [path]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def _parsed(content: dict[str, Any] | None) -> KeptRollout | None:
    try:
        return None if content is None else KeptRollout.model_validate_json(json.dumps(content))
    except ValidationError:  # of another version of ART
        return None
