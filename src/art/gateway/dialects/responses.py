"""Translate OpenAI's Responses API: a request to a chat request, an answer or its record to a response.

Clients send one answer of the model back as several items: [reasoning] [message] function_call*. Items whose ids name
the same exchange become one chat message again. Where a client has dropped the ids, neighbouring items do. The
stream of events of an answer:

response.created, response.in_progress
per item:  response.output_item.added
               response.content_part.added, response.output_text.delta*, .done, response.content_part.done     text
               the same with response.reasoning_text.*                                                    reasoning
               response.function_call_arguments.delta, .done                                                   call
           response.output_item.done
response.completed, or response.incomplete if the answer was cut off

The record has what training needs: messages, tools, the answer and how it was sampled. Fields that only the request had
(`metadata`, `max_output_tokens`, `tool_choice`, `user`) come back from it with their defaults.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from art.errors import InvalidRequestError
from art.gateway.completion import ChatStream
from art.gateway.dialects.answers import (
    AnswerParts,
    check_tool_fields,
    exchange_of,
    item_id,
    join_text,
    response_id,
    text_field,
)
from art.gateway.record.recorder import Exchange
from art.protocol.chat import Message, Tool, short
from art.protocol.dialects.chat_completions import ChatRequest, parse_chat_request
from art.protocol.dialects.responses import ENCRYPTED_REASONING, Item, ResponsesRequest, ignored_fields, is_ignored_tool
from art.protocol.dialects.structured import read_format

_ROLES = ("user", "assistant", "system", "developer")
_PLAIN_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "chat_template_kwargs", "parallel_tool_calls", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
)  # fmt: skip
"""Fields that mean the same in a chat request."""


def to_chat(request: ResponsesRequest, previous: list[Message]) -> ChatRequest:
    """Translate a request of OpenAI's Responses API to the equivalent chat request.

    Args:
        previous: the conversation that `previous_response_id` names, without its instructions.

    Raises:
        InvalidRequestError: the request has something that chat cannot express, e.g. an image.
    """
    messages: list[Message] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    messages += previous
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        messages += _messages(request.input)
    if not messages:
        raise InvalidRequestError("`input` is empty: there is nothing to answer", param="input")
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    body |= {name: value for name in _PLAIN_FIELDS if (value := getattr(request, name)) is not None}
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(request.tools or ()) if not is_ignored_tool(tool)]
    if tools:
        body["tools"] = tools
    if request.tool_choice is not None and (tools or request.tool_choice not in ("auto", "none")):
        body["tool_choice"] = request.tool_choice  # chat also understands the Responses API's flat objects
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    form = read_format((request.text or {}).get("format"), "text.format", nested=False)
    strict = [tool["name"] for tool in request.tools or () if tool.get("strict") is True and not is_ignored_tool(tool)]
    return parse_chat_request(body, form, strict, ignored_fields(request))


def _messages(items: list[Item]) -> list[Message]:
    messages: list[Message] = []
    answer: AnswerParts | None = None
    for i, item in enumerate(items):
        where = f"input.{i}"
        kind = item.get("type", "message")
        exchange_id = exchange_of(item.get("id")) or exchange_of(item.get("call_id"))
        if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
            if answer is None or _begins_another(answer, kind, exchange_id):
                messages += [answer.message()] if answer is not None else []
                answer = AnswerParts()
            answer.exchange_id = answer.exchange_id or exchange_id
            _add(answer, kind, item, where)
            continue
        if answer is not None:
            messages.append(answer.message())
            answer = None
        messages.append(_other(kind, item, where))
    return messages if answer is None else [*messages, answer.message()]


def _begins_another(answer: AnswerParts, kind: str, exchange_id: str | None) -> bool:
    """Whether an item belongs to another answer than the item before it."""
    if exchange_id is not None and answer.exchange_id is not None:
        return exchange_id != answer.exchange_id
    return kind != "function_call" and answer.has_said


def _add(answer: AnswerParts, kind: str, item: Item, where: str) -> None:
    if kind == "function_call":
        answer.add_call(
            text_field(item, "call_id", where), text_field(item, "name", where), text_field(item, "arguments", where)
        )
    elif kind == "reasoning":
        content = item.get("content") or item.get("summary") or []
        answer.reasoning.append(join_text(content, f"{where}.content", ("reasoning_text", "summary_text")))
    else:
        text = join_text(item.get("content"), f"{where}.content", ("output_text", "input_text", "text"))
        answer.texts.append(text)


def _other(kind: object, item: Item, where: str) -> Message:
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise InvalidRequestError(
                f"`{where}.role` must be user, assistant, system or developer, got {short(item.get('role'))}",
                param=f"{where}.role",
            )
        return {
            "role": item["role"],
            "content": join_text(item.get("content"), f"{where}.content", ("input_text", "text")),
        }
    if kind == "function_call_output":
        output = join_text(item.get("output"), f"{where}.output", ("input_text", "output_text", "text"))
        return {"role": "tool", "tool_call_id": text_field(item, "call_id", where), "content": output}
    raise InvalidRequestError(
        f"`{where}.type` {short(kind)} is not supported; supported types are message, function_call, "
        "function_call_output, reasoning and item_reference",
        param=f"{where}.type",
    )


def _tool(tool: dict[str, Any], where: str) -> Tool:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequestError(
            f'`{where}` must be {{"type": "function", "name": ..., "parameters": ...}}, since ART runs no tools; '
            f"got {short(tool)}",
            param=where,
        )
    check_tool_fields(tool, ("type", "name", "description", "parameters", "strict"), where)
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


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


def to_stored_response(exchange: Exchange, *, has_instructions: bool, include: list[str]) -> dict[str, Any]:
    """Build the response of an exchange again.

    Args:
        has_instructions: whether the first message came from `instructions`.
        include: further fields to write, as in a request.
    """
    tools = [{"type": "function", **tool["function"]} for tool in exchange.tools or ()]
    request = ResponsesRequest(
        model=f"{exchange.project}/{exchange.name}", input=[], tools=tools or None, include=include,
        instructions=exchange.request_messages[0]["content"] if has_instructions else None,
        temperature=exchange.temperature, top_p=exchange.top_p,
    )  # fmt: skip
    num_prompt, num_sampled = len(exchange.prompt_token_ids), len(exchange.completion_token_ids)
    answer = {
        "created": int(exchange.created_at),
        "policy_version": exchange.policy_version,
        "choices": [
            {"message": exchange.message, "finish_reason": exchange.finish_reason, "exchange_id": exchange.id}
        ],
        "usage": {
            "prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }  # fmt: skip
    response = to_response(request, answer)
    if response["completed_at"] is not None:
        response["completed_at"] = int(exchange.created_at)
    return response


def to_input_items(exchange: Exchange, *, has_instructions: bool) -> list[Item]:
    """List the items that an exchange answered, oldest first, without `instructions`."""
    messages = exchange.request_messages[1:] if has_instructions else exchange.request_messages
    items = [item for message in messages for item in _items(message)]
    name = exchange.id.removeprefix("ex_")
    return [{"id": f"in_{name}_{number}", **item} for number, item in enumerate(items)]


def _items(message: Message) -> list[Item]:
    role, content = message["role"], message["content"] or ""
    done = {"status": "completed"}
    if role == "tool":
        call_id = message.get("tool_call_id", "")
        return [{"type": "function_call_output", "call_id": call_id, "output": content, **done}]
    if role != "assistant":
        return [{"type": "message", "role": role, "content": [{"type": "input_text", "text": content}], **done}]
    items: list[Item] = []
    if reasoning := message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": reasoning}
        items.append({"type": "reasoning", "summary": [], "content": [text], **done})
    if content:
        text = {"type": "output_text", "text": content, "annotations": []}
        items.append({"type": "message", "role": role, "content": [text], **done})
    for call in message.get("tool_calls") or ():
        items.append({"type": "function_call", "call_id": call.get("id", ""), **call["function"], **done})
    return items
