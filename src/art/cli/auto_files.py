"""What `art auto` keeps in its folder, beside task.toml, scenarios.jsonl and the report.

run.toml           the options of the last call: the next one needs none
"""

from __future__ import annotations

import argparse
import os
import re
import unicodedata
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from art.errors import ConfigError
from art.scenarios.dataset import TASK_FILE
from art.scenarios.toml_file import read_toml, write_toml
from art.storage.atomic import write_file

RUN_FILE = "run.toml"
MIN_WORDS = 3
"""Of a description; less is rather the name of a folder that is not there."""

_HEAD = (
    "The options of `art auto` for this folder, each by its name there. Options that are given win and are kept here."
)


class RunOptions(BaseModel):
    """`run.toml`: options of the command, by their names in its namespace. `None` is the command's own default."""

    model_config = ConfigDict(extra="forbid")

    base_model: str | None = None
    name: str | None = None
    project: str | None = None
    data_dir: str | None = None
    judge: str | None = None
    judge_url: str | None = None
    judge_passes: Literal[1, 2] | None = None
    judge_price: tuple[float, float] | None = None
    budget: float | None = None
    price_per_hour: float | None = None
    policy_price: tuple[float, float] | None = None
    generator: str | None = None
    generator_url: str | None = None
    steps: int | None = None
    seed: int | None = None
    learning_rate: float | None = None
    groups: int | None = None
    rollouts: int | None = None
    rollout_timeout: float | None = None
    evaluate: int | None = None
    validate_every: int | None = None
    lora_rank: int | None = None
    full_finetuning: bool | None = None
    engine: Literal["torch", "vllm"] | None = None
    max_context: int | None = None

    @classmethod
    def load(cls, folder: Path) -> Self:
        path = folder / RUN_FILE
        return read_toml(path, cls) if path.exists() else cls()

    def save(self, folder: Path) -> None:
        if not (folder / RUN_FILE).exists() or self != self.load(folder):
            write_file(folder / RUN_FILE, write_toml(self.model_dump(), {}, head=_HEAD).encode())

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        values = {name: getattr(args, name) for name in cls.model_fields}
        return cls(**{name: str(value) if isinstance(value, Path) else value for name, value in values.items()})

    def namespace(self) -> argparse.Namespace:
        """What a parser fills in the rest of: it leaves alone what is there already."""
        values: dict[str, Any] = self.model_dump(exclude_none=True)
        if "data_dir" in values:
            values["data_dir"] = Path(values["data_dir"])
        return argparse.Namespace(**values)


def folder_of(what: str, out: Path | None) -> Path:
    """Where the files of a call are, or will be.

    Raises:
        ConfigError: `what` is neither a folder with a task nor a sentence.
    """
    given = Path(what)
    if given.is_dir():
        if out is not None:
            raise ConfigError(f"{what} is a folder already, so `--out {out}` has no meaning; leave it out")
        if not (given / TASK_FILE).exists():
            raise ConfigError(
                f"the folder {what} has no {TASK_FILE}; give the sentence that describes the task, and `--out`"
            )
        return given.resolve()
    if len(what.split()) < MIN_WORDS:
        raise ConfigError(
            f"{what!r} is no folder, and too short to describe a task: say in a sentence what the agent should do"
        )
    return (out or Path("auto") / slug(what)).resolve()


def slug(text: str) -> str:
    """A name for a folder and a model.

    Example: "Answer questions about our café's opening hours, politely" gives
    "answer-questions-about-our-cafes-opening".
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower().replace("'", "")
    words = re.findall(r"[a-z0-9]+", plain)
    name = ""
    for word in words:
        if len(name) + len(word) + 1 > 41:
            break
        name = f"{name}-{word}" if name else word
    return name or "task"


def inside(folder: Path) -> str:
    """A path for people: relative where that is shorter."""
    return min(os.path.relpath(folder), str(folder), key=len)
