"""Sampling: `/v1/chat/completions` and `/v1/responses` of OpenAI, and `/v1/messages` of Anthropic. And bare prompts:
OpenAI's `/v1/completions`, and vLLM's `/tokenize` and `/detokenize`, with and without `/v1`.

Each route exists with and without a project and a rollout in the URL.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response

from art.errors import ArtError, InvalidRequestError
from art.gateway.completion import ChatStream
from art.gateway.dialects import anthropic
from art.gateway.dialects.responses import to_events, to_response
from art.gateway.dialects.text_completions import (
    all_of,
    exact_text,
    read_prompt,
    to_chats,
    to_chunks,
    to_completion,
)
from art.gateway.format.size import COUNTED_CONTEXTS, check_size, work_size
from art.gateway.policies import PolicyRef
from art.gateway.turn import choose_renderer
from art.protocol.answers import ChatAnswer
from art.protocol.chat import normalize_messages
from art.protocol.dialects.anthropic import (
    CountTokensRequest,
    MessagesAnswer,
    MessagesRequest,
    TokenCount,
    parse_anthropic_request,
)
from art.protocol.dialects.chat_completions import ChatRequest, parse_chat_request
from art.protocol.dialects.responses import ResponsesAnswer, ResponsesRequest
from art.protocol.dialects.text_completions import (
    CompletionAnswer,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    parse_completion_request,
    parse_detokenize_request,
    parse_tokenize_request,
)
from art.protocol.rollouts import IN_FLIGHT_HEADER
from art.server.answers import cancel_on_disconnect, stream_events
from art.server.call import INFERENCE_BASES, Call, Route
from art.server.errors import ErrorBody
from art.server.routes.stored_responses import read_conversation

R = TypeVar("R", bound=CountTokensRequest)


async def chat_completions(call: Call) -> dict[str, Any] | Response:
    """Sample answers to a conversation, as OpenAI's API does."""
    request = await call.parse(parse_chat_request)
    return await _sample(call, request, lambda answer: answer, lambda stream: stream.chunks)


async def responses(call: Call) -> dict[str, Any] | Response:
    """Sample an answer, as OpenAI's Responses API does."""
    request, chat = await read_conversation(call)
    translate = partial(to_response, request), partial(to_events, request)
    return await _sample(call, chat, *translate, _responses_error)


async def messages(call: Call) -> dict[str, Any] | Response:
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
) -> dict[str, Any] | Response:
    """Return the answer in the dialect of the request, as events if the request streams."""
    chat.model = call.own_model(chat.model)
    rollout_id, key, gateway = call.path.get("rollout_id"), call.caller.key_id, call.runtime.gateway
    how: dict[str, Any] = {
        "rollout_id": rollout_id, "key": key, "seed": call.first_seed(), "switches": _switches(call),
        "strict": call.server.config.strict,
    }  # fmt: skip
    async with cancel_on_disconnect(call.request):
        if not chat.stream:
            answer = await gateway.complete(chat, **how)
            call.tell([chat])
            return to_answer(answer)
        stream = await gateway.stream(chat, **how)
        call.tell([chat])
        return await stream_events(to_events(stream), named_error, call.visible)


def _switches(call: Call) -> bool:
    """Whether the answer goes on with new weights when a step is published while it is sampled.

    Raises:
        InvalidRequestError: the header has an unknown value.
    """
    value = call.header(IN_FLIGHT_HEADER) or "finish"
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


# -- bare prompts --


async def completions(call: Call) -> dict[str, Any] | Response:
    """Sample texts that continue prompts, as OpenAI's older API does."""
    request = await call.parse(parse_completion_request)
    policy = await _find_policy(call, request)
    size = sum(map(len, request.prompts))
    chats = await call.server.workers.run(size, to_chats, request, policy)
    rollout_id, key, gateway = call.path.get("rollout_id"), call.caller.key_id, call.runtime.gateway
    first = call.first_seed()
    seeds = [None if first is None else first + p * request.choices_per_prompt for p in range(len(chats))]
    both = list(zip(chats, seeds, strict=True))
    how: dict[str, Any] = {"rollout_id": rollout_id, "key": key, "strict": call.server.config.strict}
    async with cancel_on_disconnect(call.request):
        if not request.stream:
            answers = await all_of([partial(gateway.complete, chat, seed=seed, **how) for chat, seed in both])
            call.tell(chats)
            return to_completion(request, answers)
        streams = await all_of([partial(gateway.stream, chat, seed=seed, **how) for chat, seed in both])
        call.tell(chats)
        return await stream_events(to_chunks(request, streams), visible=call.visible)


async def tokenize(call: Call) -> TokenizeAnswer:
    """Return the tokens of a prompt, or those that a chat request with these messages has, as vLLM does."""
    request = await call.parse(parse_tokenize_request)
    policy = await _find_policy(call, request)
    if request.prompt is None:
        token_ids = await _chat_tokens(call, request, policy)
    else:
        read = partial(
            read_prompt, add_special_tokens=request.add_special_tokens is not False, num_contexts=COUNTED_CONTEXTS
        )
        _, token_ids = await call.server.workers.run(len(request.prompt), read, request.prompt, policy)
    to_token = policy.renderer.tokenizer.backend.id_to_token
    return TokenizeAnswer(
        count=len(token_ids),
        max_model_len=policy.max_context,
        tokens=token_ids,
        token_strs=list(map(to_token, token_ids)) if request.return_token_strs else None,
    )


async def detokenize(call: Call) -> DetokenizeAnswer:
    """Return the text of tokens, as vLLM does."""
    request = await call.parse(parse_detokenize_request)
    policy = await _find_policy(call, request)
    tokenizer, token_ids = policy.renderer.tokenizer, request.tokens
    return DetokenizeAnswer(
        prompt=await call.server.workers.run(len(token_ids), exact_text, token_ids, tokenizer, "tokens")
    )


async def _find_policy(call: Call, request: CompletionRequest | TokenizeRequest | DetokenizeRequest) -> PolicyRef:
    request.model = call.own_model(request.model)
    return await call.runtime.gateway.turns.find_policy(request.model, call.path.get("rollout_id"))


async def _chat_tokens(call: Call, request: TokenizeRequest, policy: PolicyRef) -> list[int]:
    """The tokens of messages. With the opening of an answer they are those of a chat request: a conversation that
    continues recorded answers has their exact tokens."""
    fields = request.model_dump(include={"model", "messages", "tools", "chat_template_kwargs"}, exclude_none=True)
    chat = parse_chat_request(fields)
    if request.add_generation_prompt:
        return await call.runtime.gateway.prompt_token_ids(chat, rollout_id=call.path.get("rollout_id"))
    return await call.server.workers.run(work_size(chat.messages, chat.tools), _render_closed, chat, policy)


def _render_closed(chat: ChatRequest, policy: PolicyRef) -> list[int]:
    """The tokens of messages without the opening of the next answer."""
    renderer, tools = choose_renderer(policy, chat), chat.tools or None
    messages = normalize_messages(chat.messages)
    check_size(messages, tools, policy.size_limit(COUNTED_CONTEXTS))
    return renderer.render(messages, tools, opening=False)


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
            "POST", f"{base}/completions", completions, scope="infer", request=CompletionRequest,
            response=CompletionAnswer, media=_STREAMED, samples=True,
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
] + [
    route
    for base in INFERENCE_BASES
    for root in (base, base.removesuffix("/v1"))
    for route in (
        Route(
            "POST", f"{root}/tokenize", tokenize, scope="infer", request=TokenizeRequest, response=TokenizeAnswer,
        ),
        Route(
            "POST", f"{root}/detokenize", detokenize, scope="infer", request=DetokenizeRequest,
            response=DetokenizeAnswer,
        ),
    )
]  # fmt: skip
