"""Sampling: `/v1/chat/completions`, `/v1/responses` of OpenAI, and `/v1/messages` of Anthropic.

Each route exists with and without a project and a rollout in the URL.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from art.errors import ArtError, InvalidRequestError
from art.gateway.completion import ChatStream
from art.gateway.dialects import anthropic
from art.gateway.dialects.responses import to_events, to_response
from art.protocol.answers import ChatAnswer
from art.protocol.dialects.anthropic import (
    CountTokensRequest,
    MessagesAnswer,
    MessagesRequest,
    TokenCount,
    parse_anthropic_request,
)
from art.protocol.dialects.chat_completions import ChatRequest, parse_chat_request
from art.protocol.dialects.responses import ResponsesAnswer, ResponsesRequest
from art.protocol.rollouts import IN_FLIGHT_HEADER
from art.server.asgi import cancel_on_disconnect, header, send_events
from art.server.call import INFERENCE_BASES, Call, Route
from art.server.errors import ErrorBody
from art.server.routes.stored_responses import read_conversation

R = TypeVar("R", bound=CountTokensRequest)


async def chat_completions(call: Call) -> dict[str, Any] | None:
    """Sample answers to a conversation, as OpenAI's API does."""
    request = await call.parse(parse_chat_request)
    return await _sample(call, request, lambda answer: answer, lambda stream: stream.chunks)


async def responses(call: Call) -> dict[str, Any] | None:
    """Sample an answer, as OpenAI's Responses API does."""
    request, chat = await read_conversation(call)
    translate = partial(to_response, request), partial(to_events, request)
    return await _sample(call, chat, *translate, _responses_error)


async def messages(call: Call) -> dict[str, Any] | None:
    """Sample an answer, as Anthropic's Messages API does."""
    request, chat = await call.parse(partial(_read_messages, MessagesRequest))
    translate = partial(anthropic.to_message, request), partial(anthropic.to_events, request)
    chat = await _with_thinking(call, request, chat)
    return await _sample(call, chat, *translate, anthropic.error_body)


def _read_messages(kind: type[R], body: Any) -> tuple[R, ChatRequest]:
    request = parse_anthropic_request(kind, body)
    return request, anthropic.to_chat(request)


async def _with_thinking(call: Call, request: CountTokensRequest, chat: ChatRequest) -> ChatRequest:
    """Turn `thinking` into settings of the model's chat template. Settings that the request names itself win."""
    if request.thinking is not None:
        kind = request.thinking.type
        settings: Mapping[str, Any] = {}
        try:
            settings = await call.runtime.gateway.reasoning_settings(
                call.own_model(chat.model), call.path.get("rollout_id"), reasons=kind != "disabled"
            )
        except InvalidRequestError:
            if kind != "adaptive":  # which leaves it to the model
                raise
            chat.ignored.append("thinking")
        chat.chat_template_kwargs = {**settings, **(chat.chat_template_kwargs or {})} or None
    return chat


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
    how: dict[str, Any] = {
        "rollout_id": rollout_id, "key": key, "seed": call.first_seed(), "switches": _switches(call),
        "strict": call.server.config.strict,
    }  # fmt: skip
    async with cancel_on_disconnect(call.scope, call.receive):
        if not chat.stream:
            answer = await gateway.complete(chat, **how)
            call.tell([chat])
            return to_answer(answer)
        stream = await gateway.stream(chat, **how)
        call.tell([chat])
        await send_events(call.send, to_events(stream), named_error, call.visible)
    return None


def _switches(call: Call) -> bool:
    """Whether the answer goes on with new weights when a step is published while it is sampled.

    Raises:
        InvalidRequestError: the header has an unknown value.
    """
    value = header(call.scope, IN_FLIGHT_HEADER.encode()) or "finish"
    if value not in ("finish", "switch"):
        raise InvalidRequestError(f"the header {IN_FLIGHT_HEADER} must be 'finish' or 'switch', got {value!r}")
    return value == "switch"


def _responses_error(error: ArtError) -> dict[str, Any]:
    """The last event of a stream that fails: OpenAI's fields, and `error`, which makes OpenAI's client raise."""
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return {"type": "error", **fields, "error": {"type": "server_error", **fields}}


async def count_tokens(call: Call) -> TokenCount:
    """Count the tokens of a prompt, as Anthropic's Messages API does."""
    request, chat = await call.parse(partial(_read_messages, CountTokensRequest))
    chat = await _with_thinking(call, request, chat)
    chat.model = call.own_model(chat.model)
    token_ids = await call.runtime.gateway.prompt_token_ids(chat, rollout_id=call.path.get("rollout_id"))
    return TokenCount(input_tokens=len(token_ids))


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
            media=_STREAMED, samples=True, error_body=anthropic.error_body,
        ),
        Route(
            "POST", f"{base}/messages/count_tokens", count_tokens, scope="infer", request=CountTokensRequest,
            response=TokenCount, error_body=anthropic.error_body,
        ),
    )
]  # fmt: skip
