"""Answers that have no wire type of their own elsewhere. The OpenAPI document shows them; tests hold real answers to
them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from art.protocol.chat import FinishReason
from art.protocol.training import Wire


class Answer(BaseModel):
    """What may get further fields without harm to a client."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(Wire):
    message: str
    """What was given, what was expected and what to do."""
    type: str
    param: str | None
    code: str
    """Names the class of error; see `errors.py`."""


class ErrorAnswer(Wire):
    """OpenAI's shape of an error."""

    error: ErrorDetail


class Health(Answer):
    status: Literal["ok"]


class Readiness(Wire):
    ready: bool
    obstacles: dict[str, str]
    """What keeps the server from working, by what was looked at; only for those who may see all projects."""


class OpenApi(Answer):
    openapi: str
    """Version of the specification."""


class ModelCard(Wire):
    id: str
    """What to send as `model`."""
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str
    """The project."""
    base_model: str
    step: int
    """Newest published checkpoint."""


class ModelList(Wire):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ChatChoice(Answer):
    index: int
    message: dict[str, Any]
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None
    exchange_id: str
    """Under which training finds the exact tokens."""


class ChatUsage(Answer):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)


class ChatAnswer(Answer):
    """OpenAI's `chat.completion`. Built as a plain dict: a request carries a whole conversation each time."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    policy_version: int
    """Step whose weights sampled the answer."""
    choices: list[ChatChoice]
    usage: ChatUsage
