"""Sampling: `/v1/chat/completions` and `/v1/responses` of OpenAI, and `/v1/messages` of Anthropic.

Each route exists with and without a project and a rollout in the URL.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response

from art.errors import ArtError, InvalidRequestError, NotFoundError
from art.gateway import anthropic
from art.gateway.answer_parts import exchange_of, exchange_of_response
from art.gateway.anthropic import (
    CountTokensRequest,
    MessagesAnswer,
    MessagesRequest,
    TokenCount,
    parse_anthropic_request,
)
from art.gateway.completion import ChatStream
from art.gateway.renderer import reasoning_settings
from art.gateway.responses import (
    Item,
    ResponsesAnswer,
    ResponsesRequest,
    parse_responses_request,
    to_chat,
    to_events,
    to_items,
    to_response,
)
from art.protocol.answers import ChatAnswer
from art.protocol.chat import Message, short
from art.protocol.chat_completions import ChatBody, ChatRequest, parse_chat_request
from art.protocol.rollouts import IN_FLIGHT_HEADER
from art.server.answers import ErrorBody, cancel_on_disconnect, stream_events
from art.server.call import INFERENCE_BASES, ApiCall, Routes

_STREAMED = ("application/json", "text/event-stream")
ROUTES = Routes()

R = TypeVar("R", bound=CountTokensRequest)
_ITEM_SIZE = 200
"""Smallest number of characters that an item of a request is counted as, when its translation is large."""


@ROUTES.add(
    "POST", *(f"{base}/chat/completions" for base in INFERENCE_BASES), scope="infer", request=ChatBody,
    response=ChatAnswer, media=_STREAMED, samples=True,
)  # fmt: skip
async def chat_completions(call: ApiCall) -> dict[str, Any] | Response:
    """Sample answers to a conversation, as OpenAI's API does."""
    request = await call.parse(parse_chat_request)
    return await _sample(call, request, lambda answer: answer, lambda stream: stream.chunks)


@ROUTES.add(
    "POST", *(f"{base}/responses" for base in INFERENCE_BASES), scope="infer", request=ResponsesRequest,
    response=ResponsesAnswer, media=_STREAMED, samples=True,
)  # fmt: skip
async def responses(call: ApiCall) -> dict[str, Any] | Response:
    """Sample an answer, as OpenAI's Responses API does."""
    request = await call.parse(parse_responses_request)
    previous: list[Message] = []
    if (response_id := request.previous_response_id) is not None:
        exchange_id, has_instructions = exchange_of_response(response_id) or ("", False)
        exchange = call.runtime.gateway.recorder.find([exchange_id]).get(exchange_id)
        if exchange is None or call.caller.project not in (None, exchange.project):
            raise NotFoundError(
                f"response {response_id!r} is not recorded on this server", param="previous_response_id"
            )
        # The conversation of the earlier response, without its instructions.
        previous = [*exchange.request_messages, {**exchange.message, "exchange_id": exchange.id}]
        previous = previous[1:] if has_instructions else previous
    if not isinstance(request.input, str):
        request.input = _with_items(call, request.input)
    size = 0 if isinstance(request.input, str) else len(request.input) * _ITEM_SIZE
    chat = await call.server.workers.run(size, to_chat, request, previous)
    translate = partial(to_response, request), partial(to_events, request)
    return await _sample(call, chat, *translate, _responses_error)


def _with_items(call: ApiCall, items: list[Item]) -> list[Item]:
    """The items of a request, with those of earlier answers in place of references to them."""
    named = {i: item.get("id") for i, item in enumerate(items) if item.get("type") == "item_reference"}
    exchange_ids = {exchange_of(item_id) or "" for item_id in named.values()}
    known: dict[Any, Item] = {}
    for exchange in call.runtime.gateway.recorder.find(exchange_ids).values() if named else ():
        if call.caller.project in (None, exchange.project):
            known |= {item["id"]: item for item in to_items(exchange.id, exchange.message)}
    for i, item_id in named.items():
        if not isinstance(item_id, str) or item_id not in known:
            raise NotFoundError(
                f"`input.{i}` refers to the item {short(item_id)}, which no answer on this server has; send the item "
                "itself",
                param=f"input.{i}",
            )
    return [known[named[i]] if i in named else item for i, item in enumerate(items)]


@ROUTES.add(
    "POST", *(f"{base}/messages" for base in INFERENCE_BASES), scope="infer", request=MessagesRequest,
    response=MessagesAnswer, media=_STREAMED, samples=True, error_body=anthropic.error_body,
)  # fmt: skip
async def messages(call: ApiCall) -> dict[str, Any] | Response:
    """Sample an answer, as Anthropic's Messages API does."""
    request, chat = await call.parse(partial(_read_messages, MessagesRequest))
    translate = partial(anthropic.to_message, request), partial(anthropic.to_events, request)
    chat = await _with_thinking(call, request, chat)
    return await _sample(call, chat, *translate, anthropic.error_body)


def _read_messages(kind: type[R], body: Any) -> tuple[R, ChatRequest]:
    request = parse_anthropic_request(kind, body)
    return request, anthropic.to_chat(request)


async def _with_thinking(call: ApiCall, request: CountTokensRequest, chat: ChatRequest) -> ChatRequest:
    """Turn `thinking` into settings of the model's chat template. Settings that the request names itself win."""
    if request.thinking is not None:
        kind = request.thinking.type
        settings: Mapping[str, Any] = {}
        try:
            turns = call.runtime.gateway.turns
            policy = await turns.find_policy(call.own_model(chat.model), call.path.get("rollout_id"))
            settings = reasoning_settings(policy.renderer, reasons=kind != "disabled")
        except InvalidRequestError:
            if kind != "adaptive":  # which leaves it to the model
                raise
            chat.ignored.append("thinking")
        chat.chat_template_kwargs = {**settings, **(chat.chat_template_kwargs or {})} or None
    return chat


async def _sample(
    call: ApiCall,
    chat: ChatRequest,
    to_answer: Callable[[dict[str, Any]], dict[str, Any]],
    to_events: Callable[[ChatStream], AsyncGenerator[dict[str, Any], None]],
    named_error: ErrorBody | None = None,
) -> dict[str, Any] | Response:
    """Return the answer in the dialect of the request, as events if the request streams."""
    chat.model = call.own_model(chat.model)
    rollout_id, key, gateway = call.path.get("rollout_id"), call.caller.key_id, call.runtime.gateway
    when_published = call.header(IN_FLIGHT_HEADER) or "finish"
    if when_published not in ("finish", "switch"):
        raise InvalidRequestError(f"the header {IN_FLIGHT_HEADER} must be 'finish' or 'switch', got {when_published!r}")
    how: dict[str, Any] = {
        "rollout_id": rollout_id, "key": key, "seed": call.first_seed(), "scenario": call.scenario(),
        "switches": when_published == "switch", "strict": call.server.config.strict,
    }  # fmt: skip
    async with cancel_on_disconnect(call.request):
        if not chat.stream:
            answer = await gateway.complete(chat, **how)
            call.tell(chat)
            return to_answer(answer)
        stream = await gateway.stream(chat, **how)
        call.tell(chat)
        return await stream_events(to_events(stream), named_error, call.visible)


def _responses_error(error: ArtError) -> dict[str, Any]:
    """The last event of a stream that fails: OpenAI's fields, and `error`, which makes OpenAI's client raise."""
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return {"type": "error", **fields, "error": {"type": "server_error", **fields}}


@ROUTES.add(
    "POST", *(f"{base}/messages/count_tokens" for base in INFERENCE_BASES), scope="infer", request=CountTokensRequest,
    error_body=anthropic.error_body,
)  # fmt: skip
async def count_tokens(call: ApiCall) -> TokenCount:
    """Count the tokens of a prompt, as Anthropic's Messages API does."""
    request, chat = await call.parse(partial(_read_messages, CountTokensRequest))
    chat = await _with_thinking(call, request, chat)
    chat.model = call.own_model(chat.model)
    token_ids = await call.runtime.gateway.prompt_token_ids(chat, rollout_id=call.path.get("rollout_id"))
    return TokenCount(input_tokens=len(token_ids))
