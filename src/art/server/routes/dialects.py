"""`/v1/responses` and `/v1/messages`: the gateway in OpenAI's newer dialect and in Anthropic's dialect."""

from __future__ import annotations

from typing import Any

import orjson

from art.errors import ArtError, NotFoundError
from art.gateway.dialects import anthropic_input, anthropic_output, responses_input, responses_output
from art.gateway.dialects.ids import exchange_of_response
from art.protocol.chat import Message
from art.protocol.dialects.anthropic import (
    CountTokensRequest,
    MessagesAnswer,
    MessagesRequest,
    TokenCount,
    parse_count_request,
    parse_messages_request,
)
from art.protocol.dialects.responses import ResponsesAnswer, ResponsesRequest, parse_responses_request
from art.server.asgi import cancel_on_disconnect, send_named_events
from art.server.call import INFERENCE_BASES, Call, Route
from art.server.errors import public_error


async def responses(call: Call) -> dict[str, Any] | None:
    """Sample an answer, in OpenAI's Responses dialect."""
    request = parse_responses_request(await call.json())
    chat = responses_input.to_chat(request, _previous(call, request.previous_response_id))
    chat.model = await call.own_model(chat.model)
    rollout_id, gateway = call.path.get("rollout_id"), call.runtime.gateway
    async with cancel_on_disconnect(call.receive):
        if not request.stream:
            return responses_output.to_response(request, await gateway.complete(chat, rollout_id=rollout_id))
        stream = await gateway.open_stream(chat, rollout_id=rollout_id)
        await send_named_events(call.send, responses_output.to_events(request, stream.chunks), _responses_failure)
    return None


def _previous(call: Call, response_id: str | None) -> list[Message]:
    """The conversation of an earlier response, without its instructions."""
    if response_id is None:
        return []
    try:
        if (reference := exchange_of_response(response_id)) is None:
            raise NotFoundError("")
        exchange_id, has_instructions = reference
        messages = call.runtime.gateway.recorded_messages(exchange_id, project=call.caller.project)
    except NotFoundError:
        raise NotFoundError(
            f"response {response_id!r} is not recorded on this server", param="previous_response_id"
        ) from None
    return messages[1:] if has_instructions else messages


def _responses_failure(error: Exception) -> dict[str, Any]:
    """The last event of a stream that fails: OpenAI's fields, and `error`, which makes OpenAI's client raise."""
    known = public_error(error)
    fields = {"code": known.code, "message": known.message, "param": known.param}
    return {"type": "error", **fields, "error": {"type": "server_error", **fields}}


async def messages(call: Call) -> dict[str, Any] | None:
    """Sample an answer, in Anthropic's Messages dialect."""
    request = parse_messages_request(await call.json())
    chat = anthropic_input.to_chat(request)
    chat.model = await call.own_model(chat.model)
    rollout_id, gateway = call.path.get("rollout_id"), call.runtime.gateway
    async with cancel_on_disconnect(call.receive):
        if not request.stream:
            return anthropic_output.to_message(request, await gateway.complete(chat, rollout_id=rollout_id))
        stream = await gateway.open_stream(chat, rollout_id=rollout_id)
        events = anthropic_output.to_events(request, stream.chunks, stream.num_prompt_tokens)
        await send_named_events(call.send, events, lambda error: anthropic_output.error_body(public_error(error)))
    return None


async def count_tokens(call: Call) -> TokenCount:
    """Count the tokens of a prompt, in Anthropic's Messages dialect."""
    chat = anthropic_input.to_chat(parse_count_request(await call.json()))
    chat.model = await call.own_model(chat.model)
    count = await call.runtime.gateway.count_tokens(chat, rollout_id=call.path.get("rollout_id"))
    return TokenCount(input_tokens=count)


def _anthropic_error(error: ArtError, status: int) -> bytes:
    return orjson.dumps(anthropic_output.error_body(error))


_STREAMED = ("application/json", "text/event-stream")
ROUTES = [
    route
    for base in INFERENCE_BASES
    for route in (
        Route(
            "POST", f"{base}/responses", responses, scope="infer", request=ResponsesRequest, response=ResponsesAnswer,
            media=_STREAMED, samples=True,
        ),
        Route(
            "POST", f"{base}/messages", messages, scope="infer", request=MessagesRequest, response=MessagesAnswer,
            media=_STREAMED, samples=True, error_body=_anthropic_error,
        ),
        Route(
            "POST", f"{base}/messages/count_tokens", count_tokens, scope="infer", request=CountTokensRequest,
            response=TokenCount, error_body=_anthropic_error,
        ),
    )
]  # fmt: skip
