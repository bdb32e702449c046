"""Translate a chat answer to OpenAI's Responses API, as one object or as its stream of events.

response.created, response.in_progress
per item:  response.output_item.added
               response.content_part.added, response.output_text.delta*, .done, response.content_part.done     text
               the same with response.reasoning_text.*                                                    reasoning
               response.function_call_arguments.delta, .done                                                   call
           response.output_item.done
response.completed, or response.incomplete if the answer was cut off
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from art.gateway.dialects.ids import item_id, response_id
from art.gateway.stream import ChatStream
from art.protocol.dialects.responses import ENCRYPTED_REASONING, Item, ResponsesRequest

Event = dict[str, Any]


def to_response(request: ResponsesRequest, answer: dict[str, Any]) -> dict[str, Any]:
    """Translate a `chat.completion` object with one choice to a response object."""
    writer = ResponseWriter(request, answer)
    choice = answer["choices"][0]
    message = choice["message"]
    list(writer.write(message))
    *_, last = writer.finish(choice["finish_reason"], answer["usage"])
    response: dict[str, Any] = last["response"]
    return response


async def to_events(request: ResponsesRequest, stream: ChatStream) -> AsyncGenerator[Event, None]:
    """Translate `chat.completion.chunk` objects, the last one with usage, to events of the Responses API."""
    writer: ResponseWriter | None = None
    finish_reason = "stop"
    async with contextlib.aclosing(stream.chunks) as chunks:
        async for chunk in chunks:
            if writer is None:
                writer = ResponseWriter(request, chunk)
                for event in writer.begin():
                    yield event
            for choice in chunk["choices"]:
                finish_reason = choice["finish_reason"] or finish_reason
                for event in writer.write(choice["delta"]):
                    yield event
            if chunk.get("usage") is not None:
                for event in writer.finish(finish_reason, chunk["usage"]):
                    yield event


class ResponseWriter:
    """Builds a response from the deltas of a chat choice and yields an event for each change."""

    def __init__(self, request: ResponsesRequest, envelope: dict[str, Any]) -> None:
        """
        Args:
            envelope: a chunk of the chat answer, or the whole answer.
        """
        self._exchange_id = envelope["choices"][0]["exchange_id"]
        self._encrypted = ENCRYPTED_REASONING in (request.include or [])
        self._items: list[Item] = []
        self._open: tuple[Item, dict[str, Any]] | None = None
        """The text item that is still growing, and its part."""
        self._num_events = 0
        self._response = _response(request, envelope, self._exchange_id)

    def begin(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response)

    def write(self, delta: dict[str, Any]) -> Iterator[Event]:
        for key, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if text := delta.get(key):
                yield from self._text(kind, text)
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def finish(self, finish_reason: str, usage: dict[str, Any]) -> Iterator[Event]:
        cut = finish_reason == "length"
        if not self._items and self._open is None:
            yield from self._begin_text("message")  # an empty answer is still a message
        yield from self._close("incomplete" if cut else "completed")
        end: dict[str, Any] = {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "output": self._items,
            "usage": _usage(usage),
        }
        yield self._event(f"response.{end['status']}", response=self._response | end)

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open[0]["type"] != kind:
            yield from self._close("completed")
            yield from self._begin_text(kind)
        assert self._open is not None
        item, part = self._open
        part["text"] += text
        yield self._text_event("delta", item, part, delta=text)

    def _begin_text(self, kind: str) -> Iterator[Event]:
        num_before = sum(item["type"] == kind for item in self._items)
        number = num_before or None  # text after a malformed tool call makes a second message
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: Item = {"type": "message", "id": item_id("msg", self._exchange_id, number), "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": "reasoning", "id": item_id("rs", self._exchange_id, number), "summary": []}
            if self._encrypted:
                item["encrypted_content"] = self._exchange_id
        item |= {"status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=len(self._items), item=item)
        self._open = item, part
        yield self._event("response.content_part.added", **self._place(item, content_index=0), part=dict(part))

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        item, part = self._open
        yield self._text_event("done", item, part, text=part["text"])
        yield self._event("response.content_part.done", **self._place(item, content_index=0), part=part)
        yield from self._end_item(item | {"status": status, "content": [part]})
        self._open = None

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        number = sum(item["type"] == "function_call" for item in self._items)
        item = {
            "type": "function_call", "id": item_id("fc", self._exchange_id, number), "call_id": call["id"],
            "name": name, "arguments": "", "status": "in_progress",
        }  # fmt: skip
        yield self._event("response.output_item.added", output_index=len(self._items), item=item)
        place = self._place(item)
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event("response.function_call_arguments.done", **place, arguments=arguments, name=name)
        yield from self._end_item(item | {"arguments": arguments, "status": "completed"})

    def _end_item(self, item: Item) -> Iterator[Event]:
        yield self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)

    def _text_event(self, kind: str, item: Item, part: dict[str, Any], **text: str) -> Event:
        logprobs: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        return self._event(f"response.{part['type']}.{kind}", **self._place(item, content_index=0), **text, **logprobs)

    def _place(self, item: Item, **content_index: int) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._items), **content_index}

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event


def _response(request: ResponsesRequest, envelope: dict[str, Any], exchange_id: str) -> dict[str, Any]:
    """The response object before any output."""
    return {
        "id": response_id(exchange_id, has_instructions=request.instructions is not None),
        "object": "response",
        "created_at": envelope["created"],
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [{**tool, "strict": False} for tool in request.tools or ()],
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
        "exchange_id": exchange_id,
        "policy_version": envelope["policy_version"],
    }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The usage object of the Responses API. Reasoning tokens are not counted separately."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,  # nothing is charged for them
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
