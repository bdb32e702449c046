"""What goes into a rollout and into a warm start: scenarios by split, and conversations of scripted play."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from art.messages import Messages, Tools

Split = Literal["train", "val", "test"]


class Scenario(BaseModel):
    """One task input. All randomness of a rollout follows from `seed` and the rollout's index in its group."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """Unique among the scenarios of a task. The same scenario has the same id in every run."""
    seed: int
    """Seed of the scenario's randomness, e.g. of an opponent's moves and of sampling."""
    inputs: dict[str, Any] = Field(default_factory=dict)
    """What the rollout needs to know, in values that JSON can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation for the warm start of a tiny model, in a task's format. It ends with an assistant message."""

    messages: Messages
    tools: Tools | None = None
