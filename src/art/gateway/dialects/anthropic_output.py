"""Translate a chat answer to Anthropic's Messages API, as one object or as its stream of events.

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
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    PermissionDeniedError,
    RequestError,
    TrajectoryError,
)
from art.gateway.dialects.ids import item_id
from art.gateway.stream import ChatStream
from art.protocol.dialects.anthropic import MessagesRequest

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
