"""Copies answers of chat completions on their way to a client, whole answers and streams."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx2

from art.messages import load_choice
from art.trajectory import ChatExchange

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request for a chat completion, and its answers."""

    messages: list[Any]
    """Messages of the request, in OpenAI's format."""
    tools: list[Any] | None
    choices: list[Choice]
    chat: ChatExchange
    """Request and answer as they were sent."""


def keep(response: Any, read: Callable[[bytes], None]) -> None:
    """Call `read` with the body of an answer when the answer ends or the client closes it."""
    stream_type: Any = type(response.stream)
    response.stream = _copy_type(stream_type)(response.stream, read)


@functools.cache
def _copy_type(stream_type: type) -> Callable[..., Any]:
    """Make `_Copy` a stream class of the response's library, httpx2 or httpx; each accepts only its own."""
    kinds = (kind for kind in stream_type.__mro__ if kind.__name__ in ("AsyncByteStream", "SyncByteStream"))
    return type("Copy", (_Copy, *kinds), {})


class _Copy:
    """A stream, of a client that blocks or one that does not, which keeps a copy of the body."""

    def __init__(self, stream: Any, read: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._read: Callable[[bytes], None] | None = read
        self._kept: list[bytes] = []

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._kept.append(piece)
            yield piece

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self._kept.append(piece)
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
        self._end()

    def close(self) -> None:
        self._stream.close()
        self._end()

    def _end(self) -> None:
        if self._read is not None:
            self._read(b"".join(self._kept))
            self._read = None


def read_exchange(asked: bytes, headers: httpx2.Headers, raw: bytes) -> Exchange:
    """Read an exchange from the body of a request and the raw body of its answer, which may be compressed.

    Raises:
        ValueError, LookupError, TypeError: it is not a chat completion, or the stream was closed before its end.
    """
    request = json.loads(asked)
    answer = httpx2.Response(200, headers=headers, content=raw)
    is_stream = "text/event-stream" in headers.get("content-type", "")
    completion = _read_stream(answer.text) if is_stream else answer.json()
    choices = [load_choice(choice) for choice in completion["choices"]]
    chat = ChatExchange(request, completion)
    return Exchange(request["messages"], request.get("tools"), choices, chat)


def _read_stream(text: str) -> dict[str, Any]:
    """Join the chunks of a stream to a chat completion."""
    choices: dict[int, dict[str, Any]] = {}
    completion: dict[str, Any] = {}
    for line in text.splitlines():
        payload = line.removeprefix("data:").strip()
        if not line.startswith("data:") or payload == "[DONE]":
            continue
        chunk = json.loads(payload)
        completion |= {key: value for key, value in chunk.items() if value is not None}
        for part in chunk.get("choices", ()):
            choice = choices.setdefault(part["index"], {"index": part["index"], "message": {"role": "assistant"}})
            _merge(choice["message"], part.get("delta") or {})
            _merge(choice, {key: value for key, value in part.items() if key not in ("delta", "index")})
    unfinished = [index for index, choice in choices.items() if not choice.get("finish_reason")]
    if unfinished or not choices:
        raise ValueError("the stream was closed before its end")
    for choice in choices.values():
        for call in choice["message"].get("tool_calls", ()):
            call.pop("index", None)
    return completion | {"object": "chat.completion", "choices": [choices[index] for index in sorted(choices)]}


_NAMES = ("role", "type", "id", "finish_reason", "exchange_id")
"""Fields that come whole in each chunk; other texts come in pieces."""


def _merge(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a piece: texts and lists are appended; an item with an `index` is merged with the item of that index."""
    for key, value in part.items():
        known = whole.get(key)
        if value is None:
            whole.setdefault(key, None)
        elif isinstance(value, list):
            whole[key] = _merge_items(known or [], value)
        elif isinstance(value, Mapping):
            whole[key] = dict(known or {})
            _merge(whole[key], value)
        elif isinstance(value, str) and isinstance(known, str) and key not in _NAMES:
            whole[key] = known + value
        elif value != "" or not known:
            whole[key] = value


def _merge_items(known: list[Any], new: list[Any]) -> list[Any]:
    items = list(known)
    for item in new:
        index = item.get("index") if isinstance(item, Mapping) else None
        same = next((other for other in items if index is not None and other.get("index") == index), None)
        if same is not None:
            _merge(same, item)
        elif index is None:
            items.append(item)
        else:
            items.append({})
            _merge(items[-1], item)
    return items
