"""Rebuild the conversations of a rollout from its exchanges, for agents that only know a base URL."""

from __future__ import annotations

from typing import Any

from art.gateway.record.conversations import conversation_hashes, extend_hash
from art.gateway.record.recorder import Exchange


def rollout_histories(exchanges: list[Exchange]) -> list[dict[str, Any]]:
    """Rebuild a rollout's conversations: messages, with an OpenAI choice in place of each recorded answer.

    An exchange (a request with its answer) that a later one continues is part of the later one's conversation. A
    conversation that forked gives one history per end.
    """
    recorded: dict[bytes, Exchange] = {}
    ends: dict[str, bytes] = {}
    hashes: dict[str, list[bytes]] = {}
    for exchange in exchanges:
        model = f"{exchange.project}/{exchange.name}"
        hashes[exchange.id] = conversation_hashes(model, exchange.tools, None, exchange.request_messages)
        ends[exchange.id] = extend_hash(hashes[exchange.id][-1], exchange.message)
        recorded[ends[exchange.id]] = exchange
    continued = {conversation for passed in hashes.values() for conversation in passed}
    return [
        {"messages_and_choices": _items(exchange, hashes[exchange.id], recorded), "tools": exchange.tools}
        for exchange in exchanges
        if ends[exchange.id] not in continued
    ]


def _items(exchange: Exchange, hashes: list[bytes], recorded: dict[bytes, Exchange]) -> list[dict[str, Any]]:
    items = []
    for message, conversation in zip(exchange.request_messages, hashes[1:], strict=True):
        answer = recorded.get(conversation)
        items.append(message if answer is None else _choice(answer))
    return [*items, _choice(exchange)]


def _choice(exchange: Exchange) -> dict[str, Any]:
    return {
        "index": 0,
        "message": exchange.message,
        "finish_reason": exchange.finish_reason,
        "logprobs": None,
        "exchange_id": exchange.id,
        "exchange": exchange.summary(),
    }
