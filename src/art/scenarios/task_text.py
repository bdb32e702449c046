"""What is the same for all scenarios of a data set: what the agent is told, and what is good."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from art.rewards.ruler import DEFAULT_RUBRIC

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class TaskText(BaseModel):
    """`task.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: Text
    """What the agent should do, in one sentence. Nobody but people and the generator read it."""
    system_prompt: Text
    """What the agent is told before each input."""
    rubric: Text = DEFAULT_RUBRIC
    """By what the judge compares answers to one input."""
    max_completion_tokens: int = Field(default=1024, ge=1)
    """Of an answer; one that is longer is cut."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Of sampling. Training wants 1: answers to compare must differ."""
