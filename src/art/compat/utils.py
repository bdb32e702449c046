"""Functions of `art.utils` that only older code needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from art.storage.layout import DataDir

T = TypeVar("T")


def get_model_step(model: Any, art_path: str | Path) -> int:
    """The step of the newest checkpoint of `model` (any object with `project` and `name`) below `art_path`, or 0."""
    checkpoints = DataDir(Path(art_path)).model(model.project, model.name).checkpoints
    names = [path.name for path in checkpoints.iterdir() if path.is_dir()] if checkpoints.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def get_repo_root_path() -> str:
    """The folder of the git repository around the working directory, or that directory itself without one."""
    here = Path.cwd()
    return str(next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here))


def strip_logprobs(obj: T) -> T:
    """Copy choices, trajectories, or lists and dictionaries of them, with every `logprobs` set to `None`.

    Training still works, because the server has recorded the log-probs of each answer.
    """
    if isinstance(obj, dict):
        return {key: None if key == "logprobs" else strip_logprobs(value) for key, value in obj.items()}  # type: ignore[return-value]
    if isinstance(obj, (list, tuple)):
        return type(obj)(strip_logprobs(item) for item in obj)
    if isinstance(obj, BaseModel):
        return obj.model_copy(update=strip_logprobs({**obj.__dict__, **(obj.model_extra or {})}))
    return obj
