"""Copies results without their log-probs, for tools that store what functions return."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from pydantic import BaseModel

T = TypeVar("T")


def strip_logprobs(obj: T) -> T:
    """Copy an object without its log-probs, at any depth.

    Dictionaries lose the key `logprobs`; in choices, trajectories and other objects it becomes `None`. Training still
    works, because the server has recorded the log-probs of each answer.
    """
    if isinstance(obj, dict):
        return {key: strip_logprobs(value) for key, value in obj.items() if key != "logprobs"}  # type: ignore[return-value]
    if isinstance(obj, (list, tuple)):
        items = [strip_logprobs(item) for item in obj]
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    if isinstance(obj, BaseModel):
        return obj.model_copy(update=_without(obj.__dict__) | _without(obj.model_extra or {}))
    if isinstance(obj, type) or not hasattr(obj, "__dict__"):
        return obj
    copied = copy.copy(obj)
    for name, value in _without(vars(obj)).items():
        object.__setattr__(copied, name, value)  # also into a frozen dataclass
    return copied


def _without(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: None if name == "logprobs" else strip_logprobs(value) for name, value in fields.items()}
