"""The options of a task: what a user may choose about it, such as the size of a board, with defaults and bounds.

    class MazeOptions(TaskOptions):
        size: int = Field(default=4, ge=2, le=9, description="Cells on each side.")

`-o size=6` on the command line, `Maze(size=6)` and `get_task("maze", {"size": 6})` set it. A docstring below the field
does for `description` in a file.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from art.config import ScheduleConfig
from art.config.base import describe_invalid
from art.errors import ConfigError

LEARNING_RATE = 1e-5
"""Default learning rate of a LoRA adapter on a pretrained model."""
TINY_LEARNING_RATE = 3e-3
"""Default learning rate of a LoRA adapter on a tiny model, such as `art tiny-model` makes."""
TINY_TOOL_LEARNING_RATE = 2e-3
"""Default learning rate for a tiny model that calls tools. Larger steps can break calls of several arguments."""
TINY_MODEL_FILE = "tiny_model.json"
"""File that marks the folder of a tiny model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefaults:
    """Default settings for training on a task, and for its tiny model. A task of your own can keep them all."""

    learning_rate: float | None = None
    """`None` means 1e-5 for a pretrained model, 3e-3 for a tiny one, and 2e-3 for a tiny one that calls tools."""
    num_steps: int = 30
    """Number of training steps of a run."""
    groups_per_step: int = 16
    """Number of groups (scenarios) per training step."""
    rollouts_per_group: int = 8
    """Number of rollouts of each scenario."""
    num_minibatches: int = 4
    """Number of optimiser updates per training step."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Learning-rate schedule. `linear` and `cosine` fall from `learning_rate` to nearly 0 over the run."""
    warmup_steps: int = 0
    """Number of first steps in which the learning rate rises. In a short run it rises in half of the steps at most."""
    play_skill: float = 0.5
    """Mean skill, from 0 to 1, of the scripted play for a tiny model's warm start; see `Task.play`."""
    warm_start_steps: int = 600
    """Optimiser steps of a tiny model's warm start, each on 32 conversations of play. With half as many, the model may
    learn the format without reading what it is shown, and reinforcement learning then has nothing to improve."""
    tiny_vocab_size: int = 384
    """Largest vocabulary of a tiny model: 265 tokens for bytes and tags, the rest for the task's own words."""
    tiny_context: int = 1024
    """Context of a tiny model in tokens. Descriptions of many tools need more."""

    def for_base_model(self, base_model: str) -> TaskDefaults:
        """Return the defaults with the learning rate for this base model, unless `learning_rate` is set."""
        if self.learning_rate is not None:
            return self
        if not is_tiny_model(base_model):
            return replace(self, learning_rate=LEARNING_RATE)
        record = json.loads((Path(base_model).expanduser() / TINY_MODEL_FILE).read_bytes())
        return replace(self, learning_rate=TINY_TOOL_LEARNING_RATE if record.get("tools") else TINY_LEARNING_RATE)

    def rate_schedule(self, num_steps: int) -> float | ScheduleConfig:
        """Return the learning rate, by step if it changes, in a run of `num_steps`."""
        peak = LEARNING_RATE if self.learning_rate is None else self.learning_rate
        if self.schedule == "constant" and not self.warmup_steps:
            return peak
        total_steps = None if self.schedule == "constant" else num_steps
        warmup_steps = min(self.warmup_steps, num_steps // 2)
        return ScheduleConfig(type=self.schedule, peak=peak, warmup_steps=warmup_steps, total_steps=total_steps)


def is_tiny_model(base_model: str) -> bool:
    """Whether `base_model` is the folder of a tiny model."""
    return (Path(base_model).expanduser() / TINY_MODEL_FILE).is_file()


MAX_LABEL = 80
"""Longest label. A model's name adds a seed to it and may have 128 characters."""


class TaskOptions(BaseModel):
    """What a user may choose about a task. Subclass it: each field needs a docstring, a default and bounds."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    not_in_label: ClassVar[frozenset[str]] = frozenset()
    """Options that do not change what is learnt, such as a number of rollouts at once. A run goes on if they change."""


def read_options(task: str, kind: type[TaskOptions], values: Mapping[str, Any]) -> TaskOptions:
    """Make a task's options from values by name. A text, as the command line gives it, is read as the field's type.

    Args:
        task: name of the task, for errors.

    Raises:
        ConfigError: the task has no such option, or a value is not allowed.
    """
    known = list(kind.model_fields)
    if unknown := [name for name in values if name not in known]:
        if not known:
            raise ConfigError(f"task {task!r} takes no options, got {unknown[0]!r}")
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        listed = "\n  ".join(describe_options(kind))
        raise ConfigError(f"task {task!r} has no option {unknown[0]!r}{hint} Its options:\n  {listed}")
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        failed = {str(one["loc"][0]) for one in error.errors(include_url=False) if one["loc"]}
        texts = {name: _parsed(values[name]) for name in failed if isinstance(values.get(name), str)}
        try:  # `[1, 2]` or `3` as a text is no list or member of a Literal before it is parsed
            return kind.model_validate({**values, **texts})
        except ValidationError:
            options = "".join(f"\n  {line}" for line in describe_options(kind, only=failed))
            raise ConfigError(f"task {task!r}: option {describe_invalid(error)}{options}") from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def describe_options(kind: type[TaskOptions], *, only: set[str] | None = None) -> list[str]:
    """Describe a task's options for people, one a line: name, default, what it is, and what is allowed.

    Example: `size=4  Cells on each side. (from 2 to 9)`
    """
    schemas, lines = kind.model_json_schema().get("properties", {}), []
    for name, field in kind.model_fields.items():
        if only is None or name in only:
            words = re.sub(r"\s+", " ", field.description or "")
            parts = [part for part in schemas[name].get("anyOf", [schemas[name]]) if part.get("type") != "null"]
            allowed = " or ".join(filter(None, map(_allowed, parts)))
            lines.append(f"{name}={_shown(field.default)}  {words}{f' ({allowed})' if allowed else ''}".rstrip())
    return lines


def _allowed(schema: Mapping[str, Any]) -> str:
    if words := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(map(_shown, words))
    if schema.get("type") == "boolean":
        return "true, false"
    bounds = {
        "from": schema.get("minimum"), "above": schema.get("exclusiveMinimum"),
        "to": schema.get("maximum"), "below": schema.get("exclusiveMaximum"),
    }  # fmt: skip
    return " ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def label_of(name: str, options: TaskOptions) -> str:
    """Make a file-name safe label: the task's name, and the options that differ from their defaults.

    Example: `maze-size-6`. If a value has other signs than letters, digits, `.`, `_` and `-`, or if the label would be
    longer than `MAX_LABEL`, it ends with a hash.
    """
    changed = {key: value for key, value in changed_options(options).items() if key not in options.not_in_label}
    if not changed:
        return name
    return safe_label("-".join([name, *(f"{key}-{_shown(value)}" for key, value in changed.items())]))


def safe_label(text: str) -> str:
    """Make a text safe as a file name. It ends with a hash if signs were replaced, or if it was too long."""
    safe = re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", text).strip("-")
    if safe == text and len(safe) <= MAX_LABEL:
        return safe
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{safe[: MAX_LABEL - 9].rstrip('-')}-{digest}"


def changed_options(options: TaskOptions) -> dict[str, Any]:
    """Return the options that differ from their defaults, in values that JSON can hold."""
    values = options.model_dump(mode="json")
    defaults = type(options)().model_dump(mode="json")
    return {key: value for key, value in values.items() if value != defaults[key]}


def spell_options(values: Mapping[str, Any], prefix: str = "") -> str:
    """Spell options as on the command line. Example: `size=3 shows_history=false`."""
    return " ".join(f"{prefix}{key}={_shown(value)}" for key, value in values.items())
