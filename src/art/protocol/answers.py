"""Wire types of answers that belong to no other module, and the numbers that `/metrics` shows. The OpenAPI document
shows the types, and tests check real answers against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from art.protocol.training import Wire

FinishReason = Literal["stop", "length", "tool_calls"]
"""Why a choice ended."""


class OpenAnswer(BaseModel):
    """Base class of answers that may have more fields than are declared."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(Wire):
    message: str
    """What was given, what was expected and what to do."""
    type: str
    param: str | None
    code: str
    """Name of the kind of error, such as `not_found`. ART's client raises the error class of that code."""


class ErrorAnswer(Wire):
    """Body of an error, in OpenAI's form."""

    error: ErrorDetail


class Health(OpenAnswer):
    status: Literal["ok"]


class Readiness(Wire):
    ready: bool
    obstacles: dict[str, str]
    """What keeps the server from working, by the thing that was checked. Only keys for all projects see it."""


class OpenApi(OpenAnswer):
    openapi: str
    """Version of the specification."""


class ModelCard(Wire):
    id: str
    """Name to send as `model` in a request."""
    object: Literal["model"] = "model"
    created: int = 0
    """When the model was first registered, in seconds since the epoch."""
    owned_by: str
    """Name of the model's project."""
    base_model: str
    step: int
    """Step (number) of the checkpoint that is served."""

    @property
    def is_base_model(self) -> bool:
        """Whether it is the untrained base model of other models, which any of their projects may ask."""
        return self.id in (self.base_model, f"{self.owned_by}/{self.base_model}")


class ModelList(Wire):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ChoiceExchange(OpenAnswer):
    """Facts about the record of a choice, kept with the choice wherever it is logged."""

    policy_version: int
    """Step whose weights sampled the choice, or its first token if `segments` is there."""
    started_at: float | None
    """When the request was given to the engine, in seconds since the epoch."""
    ended_at: float
    """When the answer was complete, in seconds since the epoch."""
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    segments: list[tuple[int, int]] = []
    """Step and number of tokens of each part of the choice, if steps were published while it was sampled; else left
    out."""


class ChatChoice(OpenAnswer):
    index: int
    message: dict[str, Any]
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None
    exchange_id: str
    """Id of the recorded request and answer, by which training finds the exact tokens."""
    exchange: ChoiceExchange


class ChatUsage(OpenAnswer):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)


class ChatAnswer(OpenAnswer):
    """OpenAI's `chat.completion`. The gateway builds it as a plain dict, which is faster for long conversations."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    policy_version: int
    """Step whose weights sampled the answer."""
    choices: list[ChatChoice]
    usage: ChatUsage


@dataclass(frozen=True, slots=True)
class Measurement:
    """One current number that a part of the server reports to `/metrics`.

    Example: Measurement("art_process_restarts_total", 2.0, {"process": "engine of Qwen3-0.6B"})
    """

    name: str
    """One of `server.metrics.FAMILIES`."""
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


BranchReason = Literal[
    "unknown_history",  # an earlier answer is not recorded on this server
    "edited_history",  # an answer has a known exchange id, but its text was changed
    "tools_changed",  # the earlier answers are recorded, and were sampled with other tools
    "history_continues_elsewhere",  # the new messages contain an answer that was not recorded
    "reasoning_dropped",  # with the new messages, the template drops the reasoning of earlier turns
    "template_rewrites_history",  # with the new messages, the template renders earlier turns differently
    "template_without_turn_end",  # no single token marks the end of an answer, so there is no place to continue from
]
"""Why the prompt of a later turn was rendered from its messages instead of extending recorded tokens."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Says why a prompt cannot extend the recorded tokens of the turn before. It is then rendered from its messages."""

    reason: BranchReason
