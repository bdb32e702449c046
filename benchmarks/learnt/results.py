"""What runs of `art train` found: one JSON file for each task, with one entry for each seed.

results = TaskResults.open(folder, "tic_tac_toe", Settings(evaluate=400))
results.put(seed_result)              # replaces this seed, and writes the file
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

RESULTS = Path(__file__).parents[1] / "results" / "2026-11-29-cpu" / "tasks"
"""Where the newest results are."""
JUDGE_PORT = "8010"
JUDGE_URL = f"http://127.0.0.1:{JUDGE_PORT}/v1"
"""Address of the judge in commands for people. A measured run uses a free port."""


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HeldOut(_Stored):
    """The mean of a metric over held-out rollouts, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def text(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


class Baseline(HeldOut):
    """What a scripted policy reaches on the same kind of held-out scenarios."""

    about: str
    """What the policy does."""


class Judge(_Stored):
    """The scripted judge of a task that has no reward of its own."""

    noise: float = 0.1
    """Standard deviation of a score's error."""
    position_bias: float = 0.1
    """Added to the score of what is shown first, and taken from that of what is shown last."""

    def command(self, task: str) -> str:
        """What a user types to start the judge at `JUDGE_URL`."""
        errors = ["--noise", f"{self.noise:g}", "--position-bias", f"{self.position_bias:g}"]
        return shlex.join(["art", "judge", "serve", "--task", task, *errors, "--port", JUDGE_PORT])


class Settings(_Stored):
    """What was chosen in `art train`. Everything else is the default."""

    evaluate: int
    steps: int | None = None
    """`None` means the task's own number."""
    options: Mapping[str, str] = Field(default_factory=dict)
    judge: Judge | None = None
    """What scores the rollouts; `None` for the task's own reward."""

    def arguments(self, judge_url: str = JUDGE_URL) -> list[str]:
        """The options of `art train`."""
        steps = [] if self.steps is None else ["--steps", str(self.steps)]
        options = [word for key, value in self.options.items() for word in ("-o", f"{key}={value}")]
        return ["--held-out", str(self.evaluate), *steps, *options, *self.judge_arguments(judge_url)]

    def judge_arguments(self, judge_url: str = JUDGE_URL) -> list[str]:
        """The options that name the judge; none for a task with a reward of its own."""
        return [] if self.judge is None else ["--judge", "openai/judge", "--judge-url", judge_url]


class SeedResult(_Stored):
    """One run of `art train`."""

    seed: int
    metric: str
    before: HeldOut
    after: HeldOut
    rewards: Sequence[float]
    """Mean reward of the rollouts of each training step."""
    headlines: Sequence[float]
    """Mean of the metric over the rollouts of each training step."""
    form: Mapping[str, Any] = Field(default_factory=dict)
    """Options of the task that differ from their defaults: a tiny model may get a smaller form."""
    stopped: str | None = None
    """Why the training ended before its last step."""
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int
    command: str
    environment: Mapping[str, Any]
    """Date, machine with its load average at the start, versions and commit."""

    @property
    def is_learnt(self) -> bool:
        """Whether the metric rose and the two 95 % intervals do not overlap."""
        return self.after.low > self.before.high


class TaskResults(_Stored):
    """The runs of one task with the same settings."""

    task: str
    settings: Settings
    seeds: Sequence[SeedResult] = ()
    baselines: Mapping[str, Baseline] = Field(default_factory=dict)
    """What scripted policies reach: `random` any legal answer, `constant` the best fixed one, `rule` the best one."""

    @classmethod
    def open(cls, folder: Path, task: str, settings: Settings) -> Self:
        """Read the results of a task, or begin new ones.

        Raises:
            ValueError: the file holds results with other settings.
        """
        path = file_of(folder, task, settings.options)
        if not path.exists():
            return cls(task=task, settings=settings)
        results = cls.model_validate_json(path.read_text())
        if results.settings != settings:
            raise ValueError(
                f"{path} holds runs with {' '.join(results.settings.arguments())}, expected "
                f"{' '.join(settings.arguments())}; write to another folder by --out, or remove the file"
            )
        return results

    @property
    def name(self) -> str:
        """Name of the files of these results: the task's, with the options."""
        return name_of(self.task, self.settings.options)

    @property
    def title(self) -> str:
        """The task, with the options that were chosen."""
        return ", ".join([self.task, *(f"{key}={value}" for key, value in self.settings.options.items())])

    @property
    def command(self) -> str:
        """What a user types, without the seed."""
        return shlex.join(["art", "train", self.task, *self.settings.arguments()])

    def put(self, result: SeedResult, folder: Path) -> Self:
        """Write the file with this seed added or replaced, and return the new results."""
        others = [one for one in self.seeds if one.seed != result.seed]
        return self._write(folder, seeds=sorted([*others, result], key=lambda one: one.seed))

    def put_baselines(self, baselines: Mapping[str, Baseline], folder: Path) -> Self:
        """Write the file with these baselines, and return the new results."""
        return self._write(folder, baselines=baselines)

    def _write(self, folder: Path, **changes: Any) -> Self:
        new = self.model_copy(update=changes)
        path = file_of(folder, self.task, self.settings.options)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(new.model_dump_json(indent=1) + "\n")
        unfinished.replace(path)
        return new


def name_of(task: str, options: Mapping[str, str]) -> str:
    """Return a file name for a task, which may be `module:attribute`, with options."""
    words = [task, *(word for pair in options.items() for word in pair)]
    return re.sub(r"[^\w.]+", "-", "-".join(words)).strip("-.")


def file_of(folder: Path, task: str, options: Mapping[str, str]) -> Path:
    return folder / f"{name_of(task, options)}.json"


def read_all(folder: Path = RESULTS) -> list[TaskResults]:
    """Read the results of all tasks, sorted by name."""
    return [TaskResults.model_validate_json(path.read_text()) for path in sorted(folder.glob("*.json"))]
