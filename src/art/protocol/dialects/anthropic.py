"""Wire types of `/v1/messages`: Anthropic's request, checked strictly. What cannot be honoured is an error."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from art.errors import InvalidRequestError
from art.protocol.chat import parse_body, short
from art.protocol.training import Wire


class CountTokensRequest(BaseModel):
    """Body of `/v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools, each `{"name": ..., "description": ..., "input_schema": <JSON schema>}`."""
    tool_choice: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Settings of the model's chat template. Anthropic's API has no such field."""

    # Accepted at the value that means "not used".
    thinking: dict[str, Any] | None = None
    """Accepted only as `{"type": "disabled"}`: the chat template decides how a model reasons."""
    mcp_servers: list[Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None

    # A label: prompts are always cached.
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """Body of `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    """Sampling seed. Anthropic's API has no such field."""

    top_k: int | None = None
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

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "output_config": ({},),
    "context_management": ({},),
    "top_k": (),
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
    if choice is not None and (choice.get("type") not in ("auto", "none") or choice.get("disable_parallel_tool_use")):
        raise InvalidRequestError(
            f"`tool_choice` {short(choice)} cannot be enforced; supported are types 'auto' (the default) and 'none'",
            param="tool_choice",
        )
    return request
