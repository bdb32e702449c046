"""Wire type of `/v1/responses`: OpenAI's request, checked strictly. What cannot be honoured is an error."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from art.errors import InvalidRequestError
from art.protocol.chat import StreamOptions, parse_body, short

Item = dict[str, Any]
"""An entry of `input` or `output`: a message, a function call, its output, or reasoning."""

ENCRYPTED_REASONING = "reasoning.encrypted_content"


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    input: str | list[Item]
    instructions: str | None = None
    """Becomes a system message before all others. Instructions of an earlier response are not carried over."""
    previous_response_id: str | None = None
    """Continues that response's conversation; every response is stored."""
    tools: list[dict[str, Any]] | None = None
    """`{"type": "function", "name": ..., "description": ..., "parameters": <JSON schema>}`. `strict` is accepted, but
    calls are not constrained: the answer repeats the tools with `"strict": false`."""
    tool_choice: str | dict[str, Any] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[str] | None = None
    """With `reasoning.encrypted_content`, reasoning items carry a reference to the record."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    """Passed on to the chat request; OpenAI has no such field here."""
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None

    # Accepted at the value that means "not used".
    background: bool | None = None
    context_management: list[Any] | None = None
    conversation: str | dict[str, Any] | None = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool | None = None
    prompt: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None

    # Labels; without effect on the answer.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None


class ResponsesAnswer(BaseModel):
    """The fields that every response has. More fields repeat the request."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: Literal["response"]
    status: Literal["completed", "incomplete"]
    model: str
    output: list[Item]
    usage: dict[str, Any]
    exchange_id: str
    policy_version: int


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([], [ENCRYPTED_REASONING]),
    "max_tool_calls": (),
    "parallel_tool_calls": (True,),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_TEXT: dict[str, tuple[Any, ...]] = {"format": (None, {"type": "text"}), "verbosity": (None, "medium")}


def parse_responses_request(body: Any) -> ResponsesRequest:
    """Check a decoded JSON body.

    Raises:
        InvalidRequestError: with `param` naming the field at fault.
    """
    request = parse_body(ResponsesRequest, body, _UNSUPPORTED)
    for key, value in (request.text or {}).items():
        if value not in _TEXT.get(key, (None,)):
            raise InvalidRequestError(
                f"`text.{key}` {short(value)} is not supported; leave it out", param=f"text.{key}"
            )
    for key, value in (request.reasoning or {}).items():
        if value is not None:
            raise InvalidRequestError(
                f"`reasoning.{key}` is not supported (got {short(value)}): a model reasons as its chat template says; "
                "leave it out",
                param=f"reasoning.{key}",
            )
    if request.tool_choice not in (None, "auto", "none"):
        raise InvalidRequestError(
            f"`tool_choice` {short(request.tool_choice)} cannot be enforced; supported are 'auto' (the default) and "
            "'none'",
            param="tool_choice",
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("`stream_options` needs `stream: true`", param="stream_options")
    return request
