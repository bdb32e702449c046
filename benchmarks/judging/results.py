"""What trainings with and without a judge have learnt: a JSON file for each task, with an entry for each training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from benchmarks.learnt.results import HeldOut

RESULTS = Path(__file__).parents[1] / "results" / "2026-11-29-cpu" / "judged"
Source = Literal["hand", "judge", "both"]


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(_Stored):
    """Where the rewards of a training come from."""

    source: Source
    """`hand`: the task's own reward. `judge`: RULER. `both`: the mean of the two."""
    reliability: float | None = None
    """Reliability that the judge was set to have on groups of the model before training; `None` without a judge."""
    passes: Literal[1, 2] = 1
    shrink: bool = True
    """Whether scores on which two passes disagreed moved towards the mean of the group, which judges once could do."""

    @property
    def name(self) -> str:
        if self.reliability is None:
            return "by hand"
        passes = "" if self.passes == 1 else f", {self.passes} passes{', shrunk' if self.shrink else ''}"
        return f"{'judge' if self.source == 'judge' else 'both'}, {self.reliability:g}{passes}"


class Settings(_Stored):
    """What all trainings on a task share."""

    steps: int
    every: int
    """Steps from one evaluation to the next."""
    evaluate: int
    """Held-out rollouts of an evaluation."""
    split: Literal["val", "test"]
    groups: int
    rollouts: int
    learning_rate: float | None = None
    """`None` means the task's own."""


class Measured(_Stored):
    """A judge as `art judge check` measures it, against the rewards of the task."""

    reliability: float
    two_pass_reliability: float
    pairwise_accuracy: float
    order_bias: float
    spread: float
    groups: int


class Point(HeldOut):
    """The held-out metric at a step."""

    step: int


class Training(_Stored):
    """One training: its arm and seed, what the judge was like, and the held-out metric by step."""

    arm: Arm
    seed: int
    noise: float
    """Standard deviation of a score's error, and the bonus for the first place."""
    before: Measured | None
    """The judge on groups of the model before training; `None` without a judge."""
    after: Measured | None
    """The judge on groups of the trained model. `None` if all its groups consist of equal rollouts."""
    curve: Sequence[Point]
    judge_requests: int
    wall_s: float
    environment: Mapping[str, Any]

    @property
    def gain(self) -> float:
        return self.curve[-1].mean - self.curve[0].mean

    def steps_to(self, level: float) -> float | None:
        """The step at which straight lines between the points first reach `level`; `None` if they do not."""
        for one, two in zip(self.curve, self.curve[1:], strict=False):
            if two.mean >= level:
                if one.mean >= level:
                    return float(one.step)
                return one.step + (two.step - one.step) * (level - one.mean) / (two.mean - one.mean)
        return None


class JudgedTask(_Stored):
    """All trainings on one task."""

    task: str
    metric: str
    settings: Settings
    trainings: Sequence[Training] = ()

    @classmethod
    def open(cls, folder: Path, task: str, metric: str, settings: Settings) -> Self:
        """Read the trainings of a task, or begin with none.

        Raises:
            ValueError: the file holds trainings with other settings.
        """
        path = folder / f"{task}.json"
        if not path.exists():
            return cls(task=task, metric=metric, settings=settings)
        judged = cls.model_validate_json(path.read_text())
        if judged.settings != settings:
            raise ValueError(
                f"{path} holds trainings with {judged.settings}, expected {settings}; choose another folder by "
                "--judged-out, or remove the file"
            )
        return judged

    def find(self, arm: Arm, seed: int) -> Training | None:
        return next((one for one in self.trainings if (one.arm, one.seed) == (arm, seed)), None)

    def of(self, arm: Arm) -> list[Training]:
        return [one for one in self.trainings if one.arm == arm]

    def put(self, training: Training, folder: Path) -> Self:
        """Write the file with one more training, and return the new results."""
        others = [one for one in self.trainings if (one.arm, one.seed) != (training.arm, training.seed)]
        new = self.model_copy(update={"trainings": [*others, training]})
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{self.task}.part"
        unfinished.write_text(new.model_dump_json(indent=1) + "\n")
        unfinished.replace(folder / f"{self.task}.json")
        return new


def read_all(folder: Path = RESULTS) -> dict[str, JudgedTask]:
    """Read the trainings of all tasks, by name."""
    judged = [JudgedTask.model_validate_json(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {one.task: one for one in judged}
