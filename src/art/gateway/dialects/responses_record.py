"""Translate a recorded exchange back to OpenAI's Responses API: the response, and the items that it answered.

The record has what training needs: messages, tools, the answer and how it was sampled. Fields that only the request had
(`metadata`, `max_output_tokens`, `tool_choice`, `user`) come back with their defaults.
"""

from __future__ import annotations

from typing import Any

from art.gateway.dialects.responses_output import to_response
from art.gateway.record.recorder import Exchange
from art.protocol.chat import Message
from art.protocol.dialects.responses import Item, ResponsesRequest


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
