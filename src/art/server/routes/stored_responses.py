"""`/v1/responses/{response_id}`: read and delete responses of the record, and count the tokens of a request."""

from __future__ import annotations

from typing import Any

from art.errors import InvalidRequestError, NotFoundError
from art.gateway.dialects import responses
from art.gateway.dialects.answers import exchange_of, exchange_of_response
from art.gateway.dialects.responses import to_input_items, to_stored_response
from art.gateway.record.recorder import Exchange
from art.protocol.chat import short
from art.protocol.dialects.chat_completions import ChatRequest
from art.protocol.dialects.responses import (
    ENCRYPTED_REASONING,
    InputItems,
    InputTokens,
    Item,
    ResponseDeleted,
    ResponsesAnswer,
    ResponsesRequest,
    parse_responses_request,
)
from art.server.call import INFERENCE_BASES, Call, Route

MAX_ITEMS = 100
_ITEM_SIZE = 200
"""Smallest number of characters that an item of a request is counted as, when its translation is large."""


async def get_response(call: Call) -> dict[str, Any]:
    """A response of the record."""
    if call.query("stream") not in (None, "false"):
        raise InvalidRequestError("a stored response is not streamed again; leave `stream` out", param="stream")
    include = [value for name in ("include", "include[]") if (value := call.query(name)) is not None]
    if not set(include) <= {ENCRYPTED_REASONING}:
        raise InvalidRequestError(
            f"`include` {short(include[-1])} is not supported; supported is {ENCRYPTED_REASONING!r}", param="include"
        )
    exchange, has_instructions = _find(call, call.path["response_id"], "response_id")
    return to_stored_response(exchange, has_instructions=has_instructions, include=include)


async def delete_response(call: Call) -> ResponseDeleted:
    """Delete a response: its id is unknown from now on. Training may still learn from the exchange."""
    exchange, _ = _find(call, call.path["response_id"], "response_id")
    await call.runtime.gateway.deleted_responses.add(exchange.id)
    return ResponseDeleted(id=call.path["response_id"])


async def list_input_items(call: Call) -> InputItems:
    """The items that a response answered, newest first."""
    order, limit, after = call.query("order") or "desc", call.query("limit") or "20", call.query("after")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"`order` must be 'asc' or 'desc', got {short(order)}", param="order")
    if not (limit.isdecimal() and len(limit) < 4) or not 1 <= int(limit) <= MAX_ITEMS:
        raise InvalidRequestError(f"`limit` must be a number from 1 to {MAX_ITEMS}, got {short(limit)}", param="limit")
    exchange, has_instructions = _find(call, call.path["response_id"], "response_id")
    items = to_input_items(exchange, has_instructions=has_instructions)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequestError(
            f"`after` must be the id of an item of this response, got {short(after)}", param="after"
        )
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + int(limit)]
    return InputItems(
        data=page, first_id=page[0]["id"] if page else None, last_id=page[-1]["id"] if page else None,
        has_more=start + len(page) < len(items),
    )  # fmt: skip


async def count_input_tokens(call: Call) -> InputTokens:
    """Count the tokens of a prompt, in OpenAI's Responses dialect."""
    _, chat = await read_conversation(call)
    chat.model = call.own_model(chat.model)
    token_ids = await call.runtime.gateway.prompt_token_ids(chat, rollout_id=call.path.get("rollout_id"))
    return InputTokens(input_tokens=len(token_ids))


async def read_conversation(call: Call) -> tuple[ResponsesRequest, ChatRequest]:
    """Read a request in OpenAI's Responses dialect, and translate it. It continues the response that it names.

    Raises:
        NotFoundError: there is no such response for this caller.
    """
    request = await call.parse(parse_responses_request)
    previous = _previous_messages(call, request.previous_response_id)
    if not isinstance(request.input, str):
        request.input = _with_items(call, request.input)
    size = 0 if isinstance(request.input, str) else len(request.input) * _ITEM_SIZE
    return request, await call.server.workers.run(size, responses.to_chat, request, previous)


def _previous_messages(call: Call, response_id: str | None) -> list[dict[str, Any]]:
    """The conversation of an earlier response, without its instructions."""
    if response_id is None:
        return []
    exchange, has_instructions = _find(call, response_id, "previous_response_id")
    messages = [*exchange.request_messages, {**exchange.message, "exchange_id": exchange.id}]
    return messages[1:] if has_instructions else messages


def _with_items(call: Call, items: list[Item]) -> list[Item]:
    """The items of a request, with those of earlier answers in place of references to them."""
    named = {i: item.get("id") for i, item in enumerate(items) if item.get("type") == "item_reference"}
    exchange_ids = {exchange_of(item_id) or "" for item_id in named.values()}
    known: dict[Any, Item] = {}
    for exchange in call.runtime.gateway.recorder.find(exchange_ids).values() if named else ():
        if not _is_hidden(call, exchange):
            output = to_stored_response(exchange, has_instructions=False, include=[])["output"]
            known |= {item["id"]: item for item in output}
    for i, item_id in named.items():
        if not isinstance(item_id, str) or item_id not in known:
            raise NotFoundError(
                f"`input.{i}` refers to the item {short(item_id)}, which no answer on this server has; send the item "
                "itself",
                param=f"input.{i}",
            )
    return [known[named[i]] if i in named else item for i, item in enumerate(items)]


def _is_hidden(call: Call, exchange: Exchange) -> bool:
    """Whether the caller may not see an exchange, or its response was deleted."""
    is_elsewhere = call.caller.project not in (None, exchange.project)
    return is_elsewhere or call.runtime.gateway.deleted_responses.has(exchange.id)


def _find(call: Call, response_id: str, param: str) -> tuple[Exchange, bool]:
    """The exchange of a response, and whether its first message came from `instructions`."""
    exchange_id, has_instructions = exchange_of_response(response_id) or ("", False)
    exchange = call.runtime.gateway.recorder.find([exchange_id]).get(exchange_id)
    if exchange is None or _is_hidden(call, exchange):
        raise NotFoundError(f"response {response_id!r} is not recorded on this server", param=param)
    return exchange, has_instructions


_QUERY = {"limit": int, "order": str, "after": str}
_RESPONSE = "responses/{response_id}"
ROUTES = [
    route
    for base in INFERENCE_BASES
    for route in (
        Route(
            "POST", f"{base}/responses/input_tokens", count_input_tokens, scope="infer", request=ResponsesRequest,
            response=InputTokens,
        ),
        Route(
            "GET", f"{base}/{_RESPONSE}", get_response, scope="infer", response=ResponsesAnswer,
            query={"include": str, "stream": bool},
        ),
        Route("DELETE", f"{base}/{_RESPONSE}", delete_response, scope="infer", response=ResponseDeleted),
        Route(
            "GET", f"{base}/{_RESPONSE}/input_items", list_input_items, scope="infer", response=InputItems,
            query=_QUERY,
        ),
    )
]  # fmt: skip
