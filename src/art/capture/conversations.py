"""Builds conversations from exchanges with an endpoint that keeps no record."""

from __future__ import annotations

import json
from typing import Any

from art.capture.http import Exchange
from art.messages import to_message
from art.trajectory import History

_NOT_SENT_BACK = ("reasoning", "reasoning_content", "refusal", "annotations", "name")
"""Fields that clients leave out of an answer, or add to it, when they send it again."""


def add_exchange(histories: list[History], exchange: Exchange) -> None:
    """Append a request and its answers to the longest conversation that they continue, or begin one.

    Further choices of the same request, and branches, become conversations of their own. They repeat earlier answers as
    plain messages, so that no answer counts twice.
    """
    keys = [_key(message) for message in exchange.messages]
    for choice in exchange.choices:
        history = max(
            (history for history in histories if _continues(history, keys, exchange.tools)),
            key=lambda history: len(history.messages_and_choices),
            default=None,
        )
        if history is None:
            history = History(tools=exchange.tools)
            histories.append(history)
        history.messages_and_choices += exchange.messages[len(history.messages_and_choices) :]
        history.messages_and_choices.append(choice)


def _continues(history: History, keys: list[str], tools: list[dict[str, Any]] | None) -> bool:
    known = [_key(item) for item in history.messages_and_choices]
    return (history.tools or None) == (tools or None) and known == keys[: len(known)]


def _key(item: Any) -> str:
    """A key that is equal for an answer and for the message that clients make of it.

    Empty fields are left out, and the arguments of calls are compared as objects.
    """
    message = {key: value for key, value in to_message(item).items() if value and key not in _NOT_SENT_BACK}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    return json.dumps(message, sort_keys=True, default=str)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (LookupError, ValueError):  # another kind of tool, or arguments that are not JSON: compared as text
        return call
    return {"id": call.get("id"), "name": call["function"].get("name"), "arguments": arguments}
