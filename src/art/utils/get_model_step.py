"""The step of a model, from its folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from art.storage.layout import DataDir


def get_model_step(model: Any, art_path: str | Path) -> int:
    """The step of the newest checkpoint of `model` (any object with `project` and `name`) below `art_path`, or 0."""
    checkpoints = DataDir(Path(art_path)).model(model.project, model.name).checkpoints
    names = [path.name for path in checkpoints.iterdir() if path.is_dir()] if checkpoints.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)
