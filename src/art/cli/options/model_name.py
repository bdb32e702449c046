"""The name of a model on a server, as the command line gives it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model, given as PROJECT/NAME, or one of its checkpoints, given as PROJECT/NAME@STEP."""

    project: str
    name: str
    step: int | None = None

    @classmethod
    def parse(cls, text: str) -> ModelName:
        path, at, step = text.partition("@")
        project, _, name = path.partition("/")
        if not project or not name or "/" in name or (at and not (step.isascii() and step.isdecimal())):
            raise argparse.ArgumentTypeError(
                f"a model is PROJECT/NAME, and one of its checkpoints PROJECT/NAME@STEP; got {text!r}"
            )
        return cls(project, name, int(step) if at else None)

    def __str__(self) -> str:
        return f"{self.project}/{self.name}" + ("" if self.step is None else f"@{self.step}")
