"""Wire types of `/v1/messages`: Anthropic's request, checked strictly.

What only advises is accepted and reported as ignored; what says what is sampled and cannot be honoured is an error.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from art.errors import InvalidRequestError
from art.protocol.chat import short
from art.protocol.dialects.chat_completions import MAX_MODEL_NAME, parse_body
from art.protocol.training import Objects, Wire


class Thinking(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=1)
    """Advice, as in Anthropic's API, where it is a target and no limit. Only `max_tokens` ends an answer."""
    display: str | None = None
    """Advice: the answer always has the reasoning."""


class CountTokensRequest(BaseModel):
    """Body of `/v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(max_length=MAX_MODEL_NAME)
    messages: Objects = Field(min_length=1)
    system: str | Objects | None = None
    tools: Objects | None = None
    """Tools, each `{"name": ..., "description": ..., "input_schema": <JSON schema>}`."""
    tool_choice: dict[str, Any] | None = None
    """`{"type": "auto" | "any" | "tool" | "none", "name": ..., "disable_parallel_tool_use": ...}`."""
    output_config: dict[str, Any] | None = None
    """`format` says what the text of the answer looks like; `effort` is advice."""
    output_format: dict[str, Any] | None = None
    """The older name of `output_config.format`."""
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Settings of the model's chat template. Anthropic's API has no such field."""

    thinking: Thinking | None = None
    """Whether the model reasons, by the setting `enable_thinking` of its chat template where that has it."""

    # Accepted at the value that means "not used".
    mcp_servers: list[Any] | None = None
    context_management: dict[str, Any] | None = None
    """Advice if it keeps all reasoning, which is for the chat template to decide."""
    thread: dict[str, Any] | None = None
    """Conversation that the server holds. Clients that ask for one send the whole conversation after the refusal."""

    # A label: prompts are always cached.
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """Body of `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    """Sampling seed. Anthropic's API has no such field."""

    container: str | dict[str, Any] | None = None
    speed: str | None = None

    # Labels; without effect on the answer.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None


class MessagesAnswer(Wire):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]
    exchange_id: str
    policy_version: int


class TokenCount(Wire):
    input_tokens: int


R = TypeVar("R", bound=CountTokensRequest)

_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}, _KEEPS_ALL),
    "thread": (),
    "container": (),
    "speed": ("standard",),
}


def parse_anthropic_request(kind: type[R], body: Any) -> R:
    """Check the decoded JSON body of a request in Anthropic's dialect.

    Raises:
        InvalidRequestError: a field is not valid; `param` names it.
    """
    request = parse_body(kind, body, _UNSUPPORTED)
    choice = request.tool_choice
    if choice is not None and choice.get("type") not in ("auto", "any", "tool", "none"):
        raise InvalidRequestError(
            f"`tool_choice` must have a type of auto, any, tool or none, got {short(choice)}", param="tool_choice"
        )
    for key, value in (request.output_config or {}).items():
        if key not in ("format", "effort") and value is not None:
            raise InvalidRequestError(
                f"`output_config.{key}` is not supported; leave it out (got {short(value)})",
                param=f"output_config.{key}",
            )
    if not isinstance((request.output_config or {}).get("format"), dict | None):
        raise InvalidRequestError(
            '`output_config.format` must be {"type": "json_schema", "schema": ...}', param="output_config.format"
        )
    return request


def ignored_fields(request: CountTokensRequest) -> list[str]:
    """The fields of a request that only advise, and have no effect."""
    thinking = request.thinking
    has_value = {
        "thinking.budget_tokens": thinking is not None and thinking.budget_tokens,
        "thinking.display": thinking is not None and thinking.display,
        "context_management": request.context_management == _KEEPS_ALL,
        "output_config.effort": (request.output_config or {}).get("effort"),
    }
    return [name for name, value in has_value.items() if value]
