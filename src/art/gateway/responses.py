"""Translate OpenAI's Responses API: a request to a chat request, an answer to a response.

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
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any, Literal

from pydantic import Field

from art.gateway.answer_parts import (
    AnswerParts,
    exchange_of,
    item_id,
    read_tool,
    response_id,
    text_field,
)
from art.gateway.completion import ChatStream
from art.protocol.answers import OpenAnswer
from art.protocol.chat import Message, invalid, join_text, short, tool_call
from art.protocol.chat_completions import (
    LABELS,
    ChatRequest,
    OpenAIRequest,
    check_keys,
    parse_body,
    parse_chat_request,
    read_format,
)
from art.protocol.training import Objects

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


class ResponsesAnswer(OpenAnswer):
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
    "background": (False,), "context_management": ([],), "conversation": (), "include": ([], [ENCRYPTED_REASONING]),
    "max_tool_calls": (), "prompt": (), "top_logprobs": (0,), "truncation": ("disabled",),
}  # fmt: skip
_ADVICE: dict[str, tuple[str, ...]] = {
    "text": ("verbosity",),
    "reasoning": ("effort", "summary", "generate_summary"),
}
"""Keys of fields that only advise."""
_HOSTED_TOOLS = ("namespace", "web_search", "web_search_preview")
"""Types of tools that a client may offer on top of its functions. The model is not told of them."""


def parse_responses_request(body: Any) -> ResponsesRequest:
    """Check the decoded JSON body of a request to `/v1/responses`. Raises `InvalidRequestError` if a field is not
    valid; `param` names it."""
    request = parse_body(ResponsesRequest, body, _UNSUPPORTED, LABELS)
    check_keys(request.text, "text", ("format", *_ADVICE["text"]))
    check_keys(request.reasoning, "reasoning", _ADVICE["reasoning"])
    return request


def _ignored_fields(request: ResponsesRequest) -> list[str]:
    """The fields of a request that only advise, and have no effect, and the types of tools that are left out."""
    advice = [(f"{name}.{key}", (getattr(request, name) or {}).get(key)) for name in _ADVICE for key in _ADVICE[name]]
    advice.append(("client_metadata", request.client_metadata))
    left_out = {f"tools.{tool['type']}": None for tool in request.tools or () if tool.get("type") in _HOSTED_TOOLS}
    used = [name for name, value in advice if value and (name, value) != ("text.verbosity", "medium")]
    return [*used, *left_out]


_ROLES = ("user", "assistant", "system", "developer")
_PLAIN_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "chat_template_kwargs", "parallel_tool_calls", "guided_json",
    "guided_regex", "guided_choice", "structured_outputs",
)  # fmt: skip
"""Fields that mean the same in a chat request."""


def to_chat(request: ResponsesRequest, previous: list[Message]) -> ChatRequest:
    """Translate a request of OpenAI's Responses API to the equivalent chat request. `previous` is the conversation that
    `previous_response_id` names, without its instructions. Raises `InvalidRequestError` if the request has something
    that chat cannot express, e.g. an image."""
    messages: list[Message] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    given = request.input
    messages += previous
    messages += [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    if not messages:
        raise invalid("input", "is empty: there is nothing to answer")
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    body |= {name: value for name in _PLAIN_FIELDS if (value := getattr(request, name)) is not None}
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    own_tools = {i: tool for i, tool in enumerate(request.tools or ()) if tool.get("type") not in _HOSTED_TOOLS}
    as_function = partial(read_tool, kind="function", schema="parameters", known=())
    tools = [as_function(tool, f"tools.{i}") for i, tool in own_tools.items()]
    if tools:
        body["tools"] = tools
    if request.tool_choice is not None and (tools or request.tool_choice not in ("auto", "none")):
        body["tool_choice"] = request.tool_choice  # chat also understands the Responses API's flat objects
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    form = read_format((request.text or {}).get("format"), "text.format", nested=False)
    strict = [tool["name"] for tool in own_tools.values() if tool.get("strict") is True]
    return parse_chat_request(body, form, strict, _ignored_fields(request))


def _messages(items: list[Item]) -> list[Message]:
    messages: list[Message] = []
    answer: AnswerParts | None = None
    for i, item in enumerate(items):
        where, kind = f"input.{i}", item.get("type", "message")
        exchange_id = exchange_of(item.get("id")) or exchange_of(item.get("call_id"))
        is_answer = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        if answer is not None and (not is_answer or answer.ends_before(kind, exchange_id)):
            messages.append(answer.message())
            answer = None
        if not is_answer:
            messages.append(_other(kind, item, where))
            continue
        answer = answer or AnswerParts()
        answer.exchange_id = answer.exchange_id or exchange_id
        if kind == "function_call":
            answer.calls.append(tool_call(*(text_field(item, key, where) for key in ("call_id", "name", "arguments"))))
        elif kind == "reasoning":
            content = item.get("content") or item.get("summary") or []
            answer.reasoning.append(join_text(content, f"{where}.content", ("reasoning_text", "summary_text")))
        else:
            kinds = ("output_text", "input_text", "text")
            answer.texts.append(join_text(item.get("content"), f"{where}.content", kinds))
    return messages if answer is None else [*messages, answer.message()]


def _other(kind: object, item: Item, where: str) -> Message:
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {short(item.get('role'))}")
        content = join_text(item.get("content"), f"{where}.content", ("input_text", "text"))
        return {"role": item["role"], "content": content}
    if kind == "function_call_output":
        output = join_text(item.get("output"), f"{where}.output", ("input_text", "output_text", "text"))
        return {"role": "tool", "tool_call_id": text_field(item, "call_id", where), "content": output}
    supported = "message, function_call, function_call_output, reasoning and item_reference"
    raise invalid(f"{where}.type", f"{short(kind)} is not supported; supported types are {supported}")


Event = dict[str, Any]


def to_response(request: ResponsesRequest, answer: dict[str, Any]) -> dict[str, Any]:
    """Translate a `chat.completion` object with one choice to a response object."""
    writer, choice = ResponseWriter(request, answer), answer["choices"][0]
    list(writer.write(choice["message"]))
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


def to_items(exchange_id: str, message: Message) -> list[Item]:
    """The items of a recorded answer, as its response had them."""
    request, answer = ResponsesRequest(model="", input=[]), {"choices": [{"exchange_id": exchange_id}]}
    writer = ResponseWriter(request, {**answer, "created": 0, "policy_version": 0})
    list(writer.write(message))
    list(writer.close("completed"))
    return writer.items


class ResponseWriter:
    """Builds a response from the deltas of a chat choice and yields an event for each change."""

    def __init__(self, request: ResponsesRequest, envelope: dict[str, Any]) -> None:
        """`envelope` is a chunk of the chat answer, or the whole answer."""
        self._exchange_id = envelope["choices"][0]["exchange_id"]
        self._encrypted = ENCRYPTED_REASONING in (request.include or [])
        self.items: list[Item] = []
        """The items that are complete."""
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
                if self._open is None or self._open[0]["type"] != kind:
                    yield from self.close("completed")
                    yield from self._begin_text(kind)
                assert self._open is not None
                item, part = self._open
                part["text"] += text
                yield self._text_event("delta", item, part, delta=text)
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def finish(self, finish_reason: str, usage: dict[str, Any]) -> Iterator[Event]:
        cut = finish_reason == "length"
        if not self.items and self._open is None:
            yield from self._begin_text("message")  # an empty answer is still a message
        yield from self.close("incomplete" if cut else "completed")
        end: dict[str, Any] = {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "output": self.items,
            "usage": {  # reasoning tokens are not counted separately
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},  # which are free
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        yield self._event(f"response.{end['status']}", response=self._response | end)

    def _begin_text(self, kind: str) -> Iterator[Event]:
        num_before = sum(item["type"] == kind for item in self.items)
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
        yield self._event("response.output_item.added", output_index=len(self.items), item=item)
        self._open = item, part
        yield self._event("response.content_part.added", **self._place(item, content_index=0), part=dict(part))

    def close(self, status: str) -> Iterator[Event]:
        """End the item that is still growing, if there is one."""
        if self._open is None:
            return
        item, part = self._open
        yield self._text_event("done", item, part, text=part["text"])
        yield self._event("response.content_part.done", **self._place(item, content_index=0), part=part)
        yield from self._end_item(item | {"status": status, "content": [part]})
        self._open = None

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        yield from self.close("completed")
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        number = sum(item["type"] == "function_call" for item in self.items)
        item = {
            "type": "function_call", "id": item_id("fc", self._exchange_id, number), "call_id": call["id"],
            "name": name, "arguments": "", "status": "in_progress",
        }  # fmt: skip
        yield self._event("response.output_item.added", output_index=len(self.items), item=item)
        place = self._place(item)
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event("response.function_call_arguments.done", **place, arguments=arguments, name=name)
        yield from self._end_item(item | {"arguments": arguments, "status": "completed"})

    def _end_item(self, item: Item) -> Iterator[Event]:
        yield self._event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)

    def _text_event(self, kind: str, item: Item, part: dict[str, Any], **text: str) -> Event:
        logprobs: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        return self._event(f"response.{part['type']}.{kind}", **self._place(item, content_index=0), **text, **logprobs)

    def _place(self, item: Item, **content_index: int) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.items), **content_index}

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event


def _response(request: ResponsesRequest, envelope: dict[str, Any], exchange_id: str) -> dict[str, Any]:
    """The response object before any output."""
    return {
        "id": response_id(exchange_id, has_instructions=request.instructions is not None), "object": "response",
        "created_at": envelope["created"], "completed_at": None, "status": "in_progress", "background": False,
        "error": None, "incomplete_details": None, "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens, "metadata": request.metadata or {}, "model": request.model,
        "output": [], "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id, "reasoning": {"effort": None, "summary": None},
        "store": True, "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [{**tool, "strict": False} for tool in request.tools or ()],
        "top_p": 1.0 if request.top_p is None else request.top_p, "truncation": "disabled", "usage": None,
        "user": request.user, "exchange_id": exchange_id, "policy_version": envelope["policy_version"],
    }  # fmt: skip
