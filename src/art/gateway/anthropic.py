"""Translate Anthropic's Messages API: a request to a chat request, an answer to one object or its stream of events.

What says what is sampled and cannot be honoured is an error; what only advises is accepted and reported as ignored.

user       [tool_result...] [text...]     --> tool, tool, ..., user
system     [text...]                       --> system, at its place among the others
assistant  [thinking] [text] [tool_use...] --> one assistant message with reasoning and tool calls

message_start
per block:  content_block_start, content_block_delta*, content_block_stop
message_delta (stop reason, usage), message_stop
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from art import errors
from art.errors import ArtError, InvalidRequestError
from art.gateway.answer_parts import AnswerParts, exchange_of, item_id, read_tool, text_field
from art.gateway.completion import ChatStream
from art.protocol.chat import Message, invalid, join_text, short, tool_call
from art.protocol.chat_completions import (
    MAX_MODEL_NAME,
    MAX_STOP_STRINGS,
    ChatRequest,
    check_keys,
    parse_body,
    parse_chat_request,
    read_format,
)
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
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Settings of the model's chat template. Anthropic's API has no such field."""

    thinking: Thinking | None = None
    """Whether the model reasons, by the setting `enable_thinking` of its chat template where that has it."""

    context_management: dict[str, Any] | None = None
    """Advice if it keeps all reasoning, which is for the chat template to decide."""


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
    "thread": (),  # a conversation that the server holds; after the refusal clients send the whole conversation
    "container": (),
    "speed": ("standard",),
}
"""Fields that cannot be honoured, with the values that mean "not used"."""
_LABELS = ("cache_control", "metadata", "service_tier", "inference_geo")
"""Fields without effect. Prompts are always cached."""


def parse_anthropic_request(kind: type[R], body: Any) -> R:
    """Check the decoded JSON body of a request in Anthropic's dialect. Raises `InvalidRequestError` if a field is not
    valid; `param` names it."""
    request = parse_body(kind, body, _UNSUPPORTED, _LABELS)
    choice = request.tool_choice
    if choice is not None and choice.get("type") not in ("auto", "any", "tool", "none"):
        raise invalid("tool_choice", f"must have a type of auto, any, tool or none, got {short(choice)}")
    check_keys(request.output_config, "output_config", ("format", "effort"))
    return request


def _ignored_fields(request: CountTokensRequest) -> list[str]:
    """The fields of a request that only advise, and have no effect."""
    thinking = request.thinking
    has_value = {
        "thinking.budget_tokens": thinking is not None and thinking.budget_tokens,
        "thinking.display": thinking is not None and thinking.display,
        "context_management": request.context_management == _KEEPS_ALL,
        "output_config.effort": (request.output_config or {}).get("effort"),
    }
    return [name for name, value in has_value.items() if value]


_TOOL_FIELDS = ("cache_control", "eager_input_streaming")
"""Fields of a tool that say how it is billed and sent, and have no effect on the answer."""
_BETWEEN_BLOCKS = "\n\n"


def to_chat(request: CountTokensRequest) -> ChatRequest:
    """Translate a request of Anthropic's Messages API to the equivalent chat request. Raises `InvalidRequestError` if
    the request has something that chat cannot express, e.g. an image."""
    messages: list[Message] = []
    if request.system is not None:
        messages.append({"role": "system", "content": _join_blocks(request.system, "system")})
    for i, message in enumerate(request.messages):
        messages += _messages(message, f"messages.{i}")
    if messages[-1]["role"] == "assistant":
        problem = "the last message is the assistant's: ART cannot continue a given answer; end with a user message"
        raise InvalidRequestError(problem, param="messages")
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    if request.chat_template_kwargs:
        body["chat_template_kwargs"] = request.chat_template_kwargs
    if request.tools:
        body["tools"] = [
            read_tool({"type": "custom"} | tool, f"tools.{i}", kind="custom", schema="input_schema", known=_TOOL_FIELDS)
            for i, tool in enumerate(request.tools)
        ]
    if request.tool_choice is not None and (request.tools or request.tool_choice["type"] in ("any", "tool")):
        kind, named = request.tool_choice["type"], request.tool_choice.get("name")
        one = {"type": "function", "function": {"name": named}}
        body["tool_choice"] = {"any": "required", "tool": one}.get(kind, kind)
        if request.tool_choice.get("disable_parallel_tool_use"):
            body["parallel_tool_calls"] = False
    if isinstance(request, MessagesRequest):
        body |= _sampling(request)
    strict = [tool["name"] for tool in request.tools or () if tool.get("strict") is True]
    form = (request.output_config or {}).get("format")
    content_form = read_format(form, "output_config.format", nested=False)
    return parse_chat_request(body, content_form, strict, _ignored_fields(request))


def _join_blocks(blocks: Any, where: str) -> str:
    """Join blocks of text as paragraphs."""
    return join_text(blocks, where, ("text",), between=_BETWEEN_BLOCKS)


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    stops = request.stop_sequences or []
    if len(stops) > MAX_STOP_STRINGS or "" in stops:
        limit = f"takes at most {MAX_STOP_STRINGS} strings, none of them empty"
        raise invalid("stop_sequences", f"{limit}; got {short(stops)}")
    fields = {
        "max_completion_tokens": request.max_tokens, "temperature": request.temperature, "top_p": request.top_p,
        "top_k": request.top_k, "seed": request.seed, "stop": stops or None,
    }  # fmt: skip
    stream = {"stream": True, "stream_options": {"include_usage": True}} if request.stream else {}
    return {name: value for name, value in fields.items() if value is not None} | stream


def _messages(message: dict[str, Any], where: str) -> list[Message]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role", f"must be user, assistant or system, got {short(role)}")
    where = f"{where}.content"
    if not isinstance(content, (str, list)):
        raise invalid(where, f"must be text or a list of blocks, got {short(content)}")
    if role == "system" or isinstance(content, str):
        return [{"role": role, "content": _join_blocks(content, where)}]
    return [_answer(content, where)] if role == "assistant" else _user_messages(content, where)


def _answer(blocks: list[Any], where: str) -> Message:
    answer = AnswerParts()
    for i, block in enumerate(blocks):
        at = f"{where}.{i}"
        kind = _kind(block, at, ("text", "thinking", "tool_use"))
        if kind == "text":
            answer.texts.append(text_field(block, "text", at))
        elif kind == "thinking":
            answer.reasoning.append(text_field(block, "thinking", at))
            answer.exchange_id = answer.exchange_id or exchange_of(block.get("signature"))
        else:
            arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
            answer.calls.append(tool_call(text_field(block, "id", at), text_field(block, "name", at), arguments))
            answer.exchange_id = answer.exchange_id or exchange_of(block["id"])
    return answer.message()


def _user_messages(blocks: list[Any], where: str) -> list[Message]:
    """Split a user message into one message per tool result and one with the user's text."""
    messages: list[Message] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        at = f"{where}.{i}"
        if _kind(block, at, ("text", "tool_result")) == "text":
            texts.append(text_field(block, "text", at))
            continue
        if texts:
            raise InvalidRequestError(f"`{at}`: tool results must come before the text of their message", param=at)
        result = _join_blocks(block.get("content"), f"{at}.content")
        if block.get("is_error"):
            result = f"Error: {result}"
        messages.append({"role": "tool", "tool_call_id": text_field(block, "tool_use_id", at), "content": result})
    if texts or not messages:
        messages.append({"role": "user", "content": _BETWEEN_BLOCKS.join(texts)})
    return messages


def _kind(block: Any, where: str, known: tuple[str, ...]) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in known:
        what = f"a block of type {kind!r}" if kind else short(block)
        raise invalid(where, f"is {what}; supported types are {', '.join(known)}")
    return str(kind)


Event = dict[str, Any]
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES: dict[type[ArtError], str] = {
    errors.AuthenticationError: "authentication_error",
    errors.PermissionDeniedError: "permission_error",
    errors.NotFoundError: "not_found_error",
    errors.PayloadTooLargeError: "request_too_large",
    errors.OverloadedError: "rate_limit_error",
    errors.RequestError: "invalid_request_error",
    errors.TrajectoryError: "invalid_request_error",
    ArtError: "api_error",
}
"""Anthropic's error type by error class; an error gets the type of its nearest listed base class."""


def to_message(request: MessagesRequest, answer: dict[str, Any]) -> dict[str, Any]:
    """Translate a `chat.completion` object with one choice to Anthropic's message object."""
    choice = answer["choices"][0]
    message = choice["message"]
    blocks: list[dict[str, Any]] = []
    if thinking := message.get("reasoning_content"):
        # Clients send the signature back with the block, so it can name the exchange.
        blocks.append({"type": "thinking", "thinking": thinking, "signature": choice["exchange_id"]})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    usage = _usage(answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])
    return _envelope(request, answer, blocks, usage) | _stop(choice)


async def to_events(request: MessagesRequest, stream: ChatStream) -> AsyncGenerator[Event, None]:
    """Translate `chat.completion.chunk` objects, the last one with usage, to Anthropic's events."""
    num_prompt_tokens = stream.num_prompt_tokens
    writer: _BlockWriter | None = None
    end: dict[str, Any] = {}
    async with contextlib.aclosing(stream.chunks) as chunks:
        async for chunk in chunks:
            if writer is None:
                writer = _BlockWriter(chunk["choices"][0]["exchange_id"])
                yield {"type": "message_start", "message": _envelope(request, chunk, [], _usage(num_prompt_tokens, 0))}
            for choice in chunk["choices"]:
                if choice["finish_reason"] is not None:
                    end = _stop(choice)
                for event in writer.write(choice["delta"]):
                    yield event
            if chunk.get("usage") is not None:
                for event in writer.close():
                    yield event
                usage = _usage(num_prompt_tokens, chunk["usage"]["completion_tokens"])
                yield {"type": "message_delta", "delta": end, "usage": usage}
                yield {"type": "message_stop"}


def error_body(error: ArtError) -> dict[str, Any]:
    """Write an error in Anthropic's form, with ART's code and parameter added."""
    kind = next(_ERROR_TYPES[cls] for cls in type(error).__mro__ if cls in _ERROR_TYPES)
    # By these details Anthropic's tool runner goes on without a thread.
    details = {"details": {"error_code": "thread_unsupported_request"}} if error.param == "thread" else {}
    body = {"type": kind, "message": error.message, "code": error.code, "param": error.param, **details}
    return {"type": "error", "error": body}


class _BlockWriter:
    """Turns the deltas of a chat choice into events of content blocks."""

    def __init__(self, exchange_id: str) -> None:
        self._exchange_id = exchange_id
        self._open: str | None = None
        self._index = -1

    def write(self, delta: dict[str, Any]) -> Iterator[Event]:
        for key, kind in (("reasoning_content", "thinking"), ("content", "text")):
            if text := delta.get(key):
                if self._open != kind:
                    empty = {"signature": ""} if kind == "thinking" else {}
                    yield from self._start(kind, {"type": kind, kind: ""} | empty)
                yield self._delta({"type": f"{kind}_delta", kind: text})
        for call in delta.get("tool_calls") or ():
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            yield from self._start("tool_use", block)
            yield self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})

    def close(self) -> Iterator[Event]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._exchange_id})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _start(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _envelope(
    request: MessagesRequest, answer: dict[str, Any], blocks: list[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    exchange_id = answer["choices"][0]["exchange_id"]
    return {
        "id": item_id("msg", exchange_id), "type": "message", "role": "assistant", "model": request.model,
        "content": blocks, "stop_reason": None, "stop_sequence": None, "usage": usage, "exchange_id": exchange_id,
        "policy_version": answer["policy_version"],
    }  # fmt: skip


def _stop(choice: dict[str, Any]) -> dict[str, Any]:
    stop_string = choice.get("stop_reason")
    reason = "stop_sequence" if stop_string is not None else _STOP_REASONS[choice["finish_reason"]]
    return {"stop_reason": reason, "stop_sequence": stop_string}


def _usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, Any]:
    """Anthropic's usage object. Cached prompt tokens are reported as ordinary input tokens."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": num_prompt_tokens, "output_tokens": num_completion_tokens, **cached}
