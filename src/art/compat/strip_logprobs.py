"""Removes log-probs from trajectories, which makes their files small."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel

T = TypeVar("T")


def strip_logprobs(obj: T) -> T:
    """Copy choices, trajectories, or lists and dictionaries of them, with every `logprobs` set to `None`.

    Training still works, because the server has recorded the log-probs of each answer.
    """
    if isinstance(obj, dict):
        return {key: None if key == "logprobs" else strip_logprobs(value) for key, value in obj.items()}  # type: ignore[return-value]
    if isinstance(obj, (list, tuple)):
        return type(obj)(strip_logprobs(item) for item in obj)
    if isinstance(obj, BaseModel):
        held = {**obj.__dict__, **(obj.model_extra or {})}
        return obj.model_copy(update={key: strip_logprobs(value) for key, value in held.items()} | _without(held))
    return obj


def _without(held: dict[str, object]) -> dict[str, None]:
    return {"logprobs": None} if "logprobs" in held else {}
