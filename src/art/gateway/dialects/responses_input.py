"""Translate a request of OpenAI's Responses API to a chat request.

Clients send one answer of the model back as several items: [reasoning] [message] function_call*. Items whose ids name
the same exchange become one chat message again. Where a client has dropped the ids, neighbouring items do.
"""

from __future__ import annotations

from typing import Any

from art.errors import InvalidRequestError
from art.gateway.dialects.answers import AnswerParts, check_tool_fields, join_text, text_field
from art.gateway.dialects.ids import exchange_of
from art.protocol.chat import Message, Tool, short
from art.protocol.dialects.chat_completions import ChatRequest, parse_chat_request
from art.protocol.dialects.responses import Item, ResponsesRequest, ignored_fields, is_ignored_tool
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
