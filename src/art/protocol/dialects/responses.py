"""Wire type of `/v1/responses`: OpenAI's request, checked strictly.

What only advises is accepted and reported as ignored; what says what is sampled and cannot be honoured is an error.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from art.errors import InvalidRequestError
from art.protocol.answers import Answer
from art.protocol.chat import short
from art.protocol.dialects.chat_completions import OpenAIRequest, check_openai_fields, parse_body
from art.protocol.training import Objects, Wire

Item = dict[str, Any]
"""An entry of `input` or `output`: a message, a function call, its output, or reasoning."""

ENCRYPTED_REASONING = "reasoning.encrypted_content"


class ResponsesRequest(OpenAIRequest):
    input: str | Objects
    instructions: str | None = None
    """Text of a system message before all others. Instructions of an earlier response are not carried over."""
    previous_response_id: str | None = None
    """Id of an earlier response whose conversation this request continues. Every response is stored."""
    tools: Objects | None = None
    """`{"type": "function", "name": ..., "description": ..., "parameters": <JSON schema>}`. Strict tools
    are kept to their schema where the model's call format can be; the answer repeats them with `"strict": false`."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    include: list[str] | None = None
    """With `reasoning.encrypted_content`, reasoning items carry the id of the recorded request and answer."""

    text: dict[str, Any] | None = None
    """`format` says what the answer looks like; `verbosity` is advice."""
    reasoning: dict[str, Any] | None = None
    """Advice: `effort` and `summary`. A model reasons as its chat template says."""
    client_metadata: dict[str, Any] | None = None
    """Notes of the client about itself; ignored."""

    # Accepted at the value that means "not used".
    background: bool | None = None
    context_management: list[Any] | None = None
    conversation: str | dict[str, Any] | None = None
    max_tool_calls: int | None = None
    prompt: dict[str, Any] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None


class ResponsesAnswer(Answer):
    """Answer of `/v1/responses`, with the fields that every response has. More fields repeat the request."""

    id: str
    object: Literal["response"]
    status: Literal["completed", "incomplete"]
    model: str
    output: list[Item]
    usage: dict[str, Any]
    exchange_id: str
    policy_version: int


class ResponseDeleted(Wire):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItems(Wire):
    """A page of the items that a response answered."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Wire):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([], [ENCRYPTED_REASONING]),
    "max_tool_calls": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_ADVICE: dict[str, tuple[str, ...]] = {
    "text": ("verbosity",),
    "reasoning": ("effort", "summary", "generate_summary"),
}
"""Keys of fields that only advise."""
_HOSTED_TOOLS = ("namespace", "web_search", "web_search_preview")
"""Types of tools that a client may offer on top of its functions. The model is not told of them."""


def parse_responses_request(body: Any) -> ResponsesRequest:
    """Check the decoded JSON body of a request to `/v1/responses`.

    Raises:
        InvalidRequestError: a field is not valid; `param` names it.
    """
    request = parse_body(ResponsesRequest, body, _UNSUPPORTED)
    for name, keys in {"text": ("format", *_ADVICE["text"]), "reasoning": _ADVICE["reasoning"]}.items():
        for key, value in (getattr(request, name) or {}).items():
            if key not in keys and value is not None:
                raise InvalidRequestError(
                    f"`{name}.{key}` is not supported; leave it out (got {short(value)})", param=f"{name}.{key}"
                )
    if not isinstance((request.text or {}).get("format"), dict | None):
        raise InvalidRequestError('`text.format` must be an object such as {"type": "text"}', param="text.format")
    check_openai_fields(request)
    return request


def is_ignored_tool(tool: dict[str, Any]) -> bool:
    """Whether the model is not told of a tool that the client offers."""
    return tool.get("type") in _HOSTED_TOOLS


def ignored_fields(request: ResponsesRequest) -> list[str]:
    """The fields of a request that only advise, and have no effect, and the types of tools that are left out."""
    advice = [(f"{name}.{key}", (getattr(request, name) or {}).get(key)) for name in _ADVICE for key in _ADVICE[name]]
    advice.append(("client_metadata", request.client_metadata))
    left_out = {f"tools.{tool['type']}": None for tool in request.tools or () if is_ignored_tool(tool)}
    used = [name for name, value in advice if value and (name, value) != ("text.verbosity", "medium")]
    return [*used, *left_out]
