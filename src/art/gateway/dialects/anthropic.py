"""Translate Anthropic's Messages API: a request to a chat request, an answer to one object or its stream of events.

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
from typing import Any

from art.errors import (
    ArtError,
    AuthenticationError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    PermissionDeniedError,
    RequestError,
    TrajectoryError,
)
from art.gateway.completion import ChatStream
from art.gateway.dialects.answers import AnswerParts, check_tool_fields, exchange_of, item_id, join_text, text_field
from art.protocol.chat import Message, Tool, short
from art.protocol.dialects.anthropic import CountTokensRequest, MessagesRequest, ignored_fields
from art.protocol.dialects.chat_completions import MAX_STOP_STRINGS, ChatRequest, parse_chat_request
from art.protocol.dialects.structured import ContentForm, read_format

_TOOL_FIELDS = (
    "type", "name", "description", "input_schema", "strict", "defer_loading", "cache_control", "eager_input_streaming",
)  # fmt: skip
"""Fields of a tool. The last two say how it is billed and sent, and have no effect on the answer."""
_BETWEEN_BLOCKS = "\n\n"
"""Blocks of text are joined as paragraphs."""


def to_chat(request: CountTokensRequest) -> ChatRequest:
    """Translate a request of Anthropic's Messages API to the equivalent chat request.

    Raises:
        InvalidRequestError: the request has something that chat cannot express, e.g. an image.
    """
    messages: list[Message] = []
    if request.system is not None:
        messages.append(
            {"role": "system", "content": join_text(request.system, "system", ("text",), between=_BETWEEN_BLOCKS)}
        )
    for i, message in enumerate(request.messages):
        messages += _messages(message, f"messages.{i}")
    if messages[-1]["role"] == "assistant":
        raise InvalidRequestError(
            "the last message is the assistant's: ART cannot continue a given answer; end with a user message",
            param="messages",
        )
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    if request.chat_template_kwargs:
        body["chat_template_kwargs"] = request.chat_template_kwargs
    if tools := _loaded_tools(request):
        body["tools"] = tools
    if request.tool_choice is not None and (request.tools or request.tool_choice["type"] in ("any", "tool")):
        body |= _tool_choice(request.tool_choice)
    if isinstance(request, MessagesRequest):
        body |= _sampling(request)
    strict = [tool["name"] for tool in request.tools or () if tool.get("strict") is True]
    return parse_chat_request(body, _form(request), strict, ignored_fields(request))


def _loaded_tools(request: CountTokensRequest) -> list[Tool]:
    """The tools that the model is told of. One with `defer_loading` is among them once a tool result refers to it."""
    tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(request.tools or ())]
    deferred = {tool["name"] for tool in request.tools or () if tool.get("defer_loading") is True}
    if not deferred:
        return tools
    results = [block.get("content") for message in request.messages for block in _objects(message.get("content"))]
    referred = {part.get("tool_name") for result in results for part in _objects(result) if _is_reference(part)}
    return [tool for tool in tools if tool["function"]["name"] not in deferred - referred]


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _is_reference(part: dict[str, Any]) -> bool:
    return part.get("type") == "tool_reference" and isinstance(part.get("tool_name"), str)


def _tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind = choice["type"]
    named = {"type": "function", "function": {"name": choice.get("name")}}
    fields: dict[str, Any] = {"tool_choice": {"any": "required", "tool": named}.get(kind, kind)}
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _form(request: CountTokensRequest) -> ContentForm | None:
    """What the text of the answer must look like."""
    config = (request.output_config or {}).get("format")
    if config is not None and request.output_format is not None:
        raise InvalidRequestError(
            "`output_format` and `output_config.format` are the same; send only one of them", param="output_format"
        )
    where = "output_format" if config is None else "output_config.format"
    return read_format(config or request.output_format, where, nested=False)


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    stops = request.stop_sequences or []
    if len(stops) > MAX_STOP_STRINGS or "" in stops:
        raise InvalidRequestError(
            f"`stop_sequences` takes at most {MAX_STOP_STRINGS} strings, none of them empty; got {short(stops)}",
            param="stop_sequences",
        )
    fields = {
        "max_completion_tokens": request.max_tokens, "temperature": request.temperature, "top_p": request.top_p,
        "top_k": request.top_k, "seed": request.seed, "stop": stops or None,
    }  # fmt: skip
    stream = {"stream": True, "stream_options": {"include_usage": True}} if request.stream else {}
    return {name: value for name, value in fields.items() if value is not None} | stream


def _messages(message: dict[str, Any], where: str) -> list[Message]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequestError(
            f"`{where}.role` must be user, assistant or system, got {short(role)}", param=f"{where}.role"
        )
    if not isinstance(content, (str, list)):
        raise InvalidRequestError(
            f"`{where}.content` must be text or a list of blocks, got {short(content)}", param=f"{where}.content"
        )
    if role == "system":
        return [{"role": role, "content": join_text(content, f"{where}.content", ("text",), between=_BETWEEN_BLOCKS)}]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    convert = _answer if role == "assistant" else _user_messages
    return convert(content, f"{where}.content")


def _answer(blocks: list[Any], where: str) -> list[Message]:
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
            answer.add_call(text_field(block, "id", at), text_field(block, "name", at), arguments)
            answer.exchange_id = answer.exchange_id or exchange_of(block["id"])
    return [answer.message()]


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
        result = _result_text(block.get("content"), f"{at}.content")
        if block.get("is_error"):
            result = f"Error: {result}"
        messages.append({"role": "tool", "tool_call_id": text_field(block, "tool_use_id", at), "content": result})
    if texts or not messages:
        messages.append({"role": "user", "content": _BETWEEN_BLOCKS.join(texts)})
    return messages


def _result_text(content: Any, where: str) -> str:
    """The text of a tool result. A reference to a tool, which then is among the tools, reads as the tool's name."""
    if isinstance(content, list):
        content = [
            {"type": "text", "text": part["tool_name"]} if isinstance(part, dict) and _is_reference(part) else part
            for part in content
        ]
    return join_text(content, where, ("text",), between=_BETWEEN_BLOCKS)


def _kind(block: Any, where: str, known: tuple[str, ...]) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in known:
        what = f"a block of type {kind!r}" if kind else short(block)
        raise InvalidRequestError(f"`{where}` is {what}; supported types are {', '.join(known)}", param=where)
    return str(kind)


def _tool(tool: dict[str, Any], where: str) -> Tool:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequestError(
            f'`{where}` must be {{"name": ..., "input_schema": ...}}, since ART runs no tools; got {short(tool)}',
            param=where,
        )
    check_tool_fields(tool, _TOOL_FIELDS, where)
    function = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
    if tool.get("input_schema") is not None:
        function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


Event = dict[str, Any]
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES: dict[type[ArtError], str] = {
    AuthenticationError: "authentication_error",
    PermissionDeniedError: "permission_error",
    NotFoundError: "not_found_error",
    PayloadTooLargeError: "request_too_large",
    OverloadedError: "rate_limit_error",
    RequestError: "invalid_request_error",
    TrajectoryError: "invalid_request_error",
    ArtError: "api_error",
}
"""Anthropic's error type by error class; an error gets the type of its nearest listed base class."""


def to_message(request: MessagesRequest, answer: dict[str, Any]) -> dict[str, Any]:
    """Translate a `chat.completion` object with one choice to Anthropic's message object."""
    choice = answer["choices"][0]
    message = choice["message"]
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        # Clients send the signature back with the block, so it can name the exchange.
        block = {"type": "thinking", "thinking": message["reasoning_content"], "signature": choice["exchange_id"]}
        blocks.append(block)
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        blocks.append(block | {"input": json.loads(call["function"]["arguments"])})
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
    body: dict[str, Any] = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    if error.param == "thread":  # by these details Anthropic's tool runner goes on without a thread
        body["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": body}


class _BlockWriter:
    """Turns the deltas of a chat choice into events of content blocks."""

    def __init__(self, exchange_id: str) -> None:
        self._exchange_id = exchange_id
        self._open: str | None = None
        self._index = -1

    def write(self, delta: dict[str, Any]) -> Iterator[Event]:
        for key, kind, field in (("reasoning_content", "thinking", "thinking"), ("content", "text", "text")):
            if text := delta.get(key):
                if self._open != kind:
                    empty = {"signature": ""} if kind == "thinking" else {}
                    yield from self._start(kind, {"type": kind, field: ""} | empty)
                yield self._delta({"type": f"{kind}_delta", field: text})
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
        "id": item_id("msg", exchange_id),
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": blocks,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
        "exchange_id": exchange_id,
        "policy_version": answer["policy_version"],
    }


def _stop(choice: dict[str, Any]) -> dict[str, Any]:
    stop_string = choice.get("stop_reason")
    reason = "stop_sequence" if stop_string is not None else _STOP_REASONS[choice["finish_reason"]]
    return {"stop_reason": reason, "stop_sequence": stop_string}


def _usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, Any]:
    """Anthropic's usage object. Cached prompt tokens are reported as ordinary input tokens."""
    return {
        "input_tokens": num_prompt_tokens,
        "output_tokens": num_completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
