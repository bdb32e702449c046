"""The part of a data set that all its scenarios share: prompt, rubric and limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from art.rewards.ruler import DEFAULT_RUBRIC

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class TaskText(BaseModel):
    """The content of `task.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: Text
    """What the agent should do, in one sentence. Only people and the generator read it."""
    system_prompt: Text
    """What the agent is told before each input."""
    rubric: Text = DEFAULT_RUBRIC
    """Rules by which the judge compares answers to one input."""
    max_completion_tokens: int = Field(default=1024, ge=1)
    """Most tokens of an answer; a longer one is cut."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature. Training wants 1, because answers to compare must differ."""
