"""Bare prompts: OpenAI's `/v1/completions`, and vLLM's `/tokenize` and `/detokenize`, with and without `/v1`."""

from __future__ import annotations

from functools import partial
from typing import Any

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
from art.protocol.chat import normalize_messages
from art.protocol.dialects.chat_completions import ChatRequest, parse_chat_request
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
from art.server.asgi import cancel_on_disconnect, send_events
from art.server.call import INFERENCE_BASES, Call, Route


async def completions(call: Call) -> dict[str, Any] | None:
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
    async with cancel_on_disconnect(call.scope, call.receive):
        if not request.stream:
            answers = await all_of([partial(gateway.complete, chat, seed=seed, **how) for chat, seed in both])
            call.tell(chats)
            return to_completion(request, answers)
        streams = await all_of([partial(gateway.stream, chat, seed=seed, **how) for chat, seed in both])
        call.tell(chats)
        await send_events(call.send, to_chunks(request, streams), visible=call.visible)
    return None


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


ROUTES = [
    Route(
        "POST", f"{base}/completions", completions, scope="infer", request=CompletionRequest,
        response=CompletionAnswer, media=("application/json", "text/event-stream"), samples=True,
    )
    for base in INFERENCE_BASES
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
