"""Sampling: `/v1/chat/completions`, `/v1/responses` of OpenAI, and `/v1/messages` of Anthropic.

Each route exists with and without a project and a rollout in the URL.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from art.errors import ArtError, NotFoundError
from art.gateway.dialects import anthropic_input, anthropic_output, responses_input, responses_output
from art.gateway.dialects.ids import exchange_of_response
from art.gateway.stream import ChatStream
from art.protocol.answers import ChatAnswer
from art.protocol.chat import ChatRequest, Message, parse_chat_request
from art.protocol.dialects.anthropic import (
    CountTokensRequest,
    MessagesAnswer,
    MessagesRequest,
    TokenCount,
    parse_anthropic_request,
)
from art.protocol.dialects.responses import ResponsesAnswer, ResponsesRequest, parse_responses_request
from art.server.asgi import cancel_on_disconnect, send_events
from art.server.call import INFERENCE_BASES, Call, Route
from art.server.errors import ErrorBody


async def chat_completions(call: Call) -> dict[str, Any] | None:
    """Sample answers to a conversation, as OpenAI's API does."""
    request = parse_chat_request(await call.json())
    return await _sample(call, request, lambda answer: answer, lambda stream: stream.chunks)


async def responses(call: Call) -> dict[str, Any] | None:
    """Sample an answer, as OpenAI's Responses API does."""
    request = parse_responses_request(await call.json())
    chat = responses_input.to_chat(request, _previous(call, request.previous_response_id))
    translate = partial(responses_output.to_response, request), partial(responses_output.to_events, request)
    return await _sample(call, chat, *translate, _responses_error)


async def messages(call: Call) -> dict[str, Any] | None:
    """Sample an answer, as Anthropic's Messages API does."""
    request = parse_anthropic_request(MessagesRequest, await call.json())
    translate = partial(anthropic_output.to_message, request), partial(anthropic_output.to_events, request)
    return await _sample(call, anthropic_input.to_chat(request), *translate, anthropic_output.error_body)


async def _sample(
    call: Call,
    chat: ChatRequest,
    to_answer: Callable[[dict[str, Any]], dict[str, Any]],
    to_events: Callable[[ChatStream], AsyncGenerator[dict[str, Any], None]],
    named_error: ErrorBody | None = None,
) -> dict[str, Any] | None:
    """Return the answer in the dialect of the request, or send it as events if the request streams."""
    chat.model = call.own_model(chat.model)
    rollout_id, key, gateway = call.path.get("rollout_id"), call.caller.key_id, call.runtime.gateway
    async with cancel_on_disconnect(call.receive):
        if not chat.stream:
            return to_answer(await gateway.complete(chat, rollout_id=rollout_id, key=key))
        stream = await gateway.stream(chat, rollout_id=rollout_id, key=key)
        await send_events(call.send, to_events(stream), named_error, call.visible)
    return None


def _previous(call: Call, response_id: str | None) -> list[Message]:
    """The conversation of an earlier response, without its instructions."""
    if response_id is None:
        return []
    try:
        exchange_id, has_instructions = exchange_of_response(response_id) or ("", False)
        messages = call.runtime.gateway.recorded_messages(exchange_id, project=call.caller.project)
    except NotFoundError:
        raise NotFoundError(
            f"response {response_id!r} is not recorded on this server", param="previous_response_id"
        ) from None
    return messages[1:] if has_instructions else messages


def _responses_error(error: ArtError) -> dict[str, Any]:
    """The last event of a stream that fails: OpenAI's fields, and `error`, which makes OpenAI's client raise."""
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return {"type": "error", **fields, "error": {"type": "server_error", **fields}}


async def count_tokens(call: Call) -> TokenCount:
    """Count the tokens of a prompt, as Anthropic's Messages API does."""
    chat = anthropic_input.to_chat(parse_anthropic_request(CountTokensRequest, await call.json()))
    chat.model = call.own_model(chat.model)
    count = await call.runtime.gateway.count_tokens(chat, rollout_id=call.path.get("rollout_id"))
    return TokenCount(input_tokens=count)


_STREAMED = ("application/json", "text/event-stream")
ROUTES = [
    route
    for base in INFERENCE_BASES
    for route in (
        Route(
            "POST", f"{base}/chat/completions", chat_completions, scope="infer", request=ChatRequest,
            response=ChatAnswer, media=_STREAMED, samples=True,
        ),
        Route(
            "POST", f"{base}/responses", responses, scope="infer", request=ResponsesRequest, response=ResponsesAnswer,
            media=_STREAMED, samples=True,
        ),
        Route(
            "POST", f"{base}/messages", messages, scope="infer", request=MessagesRequest, response=MessagesAnswer,
            media=_STREAMED, samples=True, error_body=anthropic_output.error_body,
        ),
        Route(
            "POST", f"{base}/messages/count_tokens", count_tokens, scope="infer", request=CountTokensRequest,
            response=TokenCount, error_body=anthropic_output.error_body,
        ),
    )
]  # fmt: skip
