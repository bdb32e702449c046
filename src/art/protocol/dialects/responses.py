"""Wire type of `/v1/responses`: OpenAI's request, checked strictly. What cannot be honoured is an error."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from art.errors import InvalidRequestError
from art.protocol.answers import Answer
from art.protocol.chat import OpenAIRequest, check_openai_fields, parse_body, short

Item = dict[str, Any]
"""An entry of `input` or `output`: a message, a function call, its output, or reasoning."""

ENCRYPTED_REASONING = "reasoning.encrypted_content"


class ResponsesRequest(OpenAIRequest):
    input: str | list[Item]
    instructions: str | None = None
    """Text of a system message before all others. Instructions of an earlier response are not carried over."""
    previous_response_id: str | None = None
    """Id of an earlier response whose conversation this request continues. Every response is stored."""
    tools: list[dict[str, Any]] | None = None
    """`{"type": "function", "name": ..., "description": ..., "parameters": <JSON schema>}`. `strict` is accepted, but
    calls are not constrained: the answer repeats the tools with `"strict": false`."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    include: list[str] | None = None
    """With `reasoning.encrypted_content`, reasoning items carry the id of the recorded request and answer."""

    # Accepted at the value that means "not used".
    background: bool | None = None
    context_management: list[Any] | None = None
    conversation: str | dict[str, Any] | None = None
    max_tool_calls: int | None = None
    prompt: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None

    prompt_cache_retention: str | None = None
    """A label without effect on the answer."""


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
    """Check the decoded JSON body of a request to `/v1/responses`.

    Raises:
        InvalidRequestError: a field is not valid; `param` names it.
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
    check_openai_fields(request)
    return request
