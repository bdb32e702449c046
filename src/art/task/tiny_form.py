"""What a tiny model was made for: a task and its options, recorded in the file `tiny_model.json` in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from art.errors import ConfigError
from art.task.defaults import TINY_MODEL_FILE
from art.task.interface import Task


class TinyForm(BaseModel):
    """The task whose play a tiny model was made from, with all options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    label: str
    options: dict[str, Any] = {}

    @classmethod
    def of_task(cls, task: Task) -> TinyForm:
        return cls(name=task.name, label=task.label, options=task.options.model_dump(mode="json"))


def read_form(base_model: str) -> TinyForm | None:
    """Read what a tiny model was made for. `None` if it is no tiny model, or was made from conversations.

    Raises:
        ConfigError: the file is not one that ART wrote.
    """
    path = Path(base_model).expanduser() / TINY_MODEL_FILE
    if not path.is_file():
        return None
    try:
        task = json.loads(path.read_text(encoding="utf-8")).get("task")
        return None if task is None else TinyForm.model_validate(task)
    except (OSError, ValueError, AttributeError, ValidationError) as error:
        raise ConfigError(f"{path} is not what `art tiny-model` writes: {error}") from error


def other_task(task: Task, base_model: str) -> str | None:
    """Say that a base model is a tiny model made for another task, or for other options. `None` if it is not."""
    form = read_form(base_model)
    if form is None or form.label == task.label:
        return None
    return (
        f"{base_model} is a tiny model made for {form.label}, not for {task.label}, so it may not know its words and "
        "its format, and may learn nothing. Make one for it by `art tiny-model`, with the same options"
    )
