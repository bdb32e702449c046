"""Translate OpenAI's text completions: a prompt becomes a chat request with its own tokens, a chat answer becomes text.

    prompt p --encode--> tokens --chat request without a template--> chat answer --> choices p * n ... p * n + n - 1

In the record the prompt is a user message and the text is its answer, with the exact tokens of both. So rollouts of
text completions are collected, judged and trained as those of chats are.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from art.errors import ContextLengthError, InvalidRequestError
from art.gateway.completion import ChatStream
from art.gateway.format.size import check_size
from art.gateway.format.tokenizer import Tokenizer
from art.gateway.policies import PolicyRef
from art.protocol.chat import Message
from art.protocol.dialects.chat_completions import ChatRequest, bare_request
from art.protocol.dialects.text_completions import CompletionRequest, TokenIds

T = TypeVar("T")
Chunk = dict[str, Any]
_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "stop", "stream",
    "stream_options",
)  # fmt: skip
"""Fields that mean the same in a chat request."""


def to_chats(request: CompletionRequest, policy: PolicyRef) -> list[ChatRequest]:
    """Make one chat request of each prompt.

    Raises:
        InvalidRequestError: a prompt is empty, or has an id that is no token.
        ContextLengthError: a prompt leaves no room for an answer.
    """
    fields = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    fields |= {"model": request.model, "max_tokens": request.token_limit}
    if request.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": request.logprobs}
    chats = []
    for p, prompt in enumerate(request.prompts):
        message, token_ids = read_prompt(prompt, policy, add_special_tokens=request.add_special_tokens)
        _check_length(token_ids, policy)
        seed = {} if request.seed is None else {"seed": (request.seed + p * request.choices_per_prompt) % 2**64}
        chats.append(bare_request({**fields, **seed, "messages": [message]}, token_ids))
    return chats


def read_prompt(
    prompt: str | TokenIds, policy: PolicyRef, *, add_special_tokens: bool, num_contexts: int = 1
) -> tuple[Message, TokenIds]:
    """Return a prompt as the message under which it is recorded, and as tokens.

    Raises:
        InvalidRequestError: an id is no token of the model.
        ContextLengthError: the text is longer than `num_contexts` times the model's context.
    """
    tokenizer = policy.renderer.tokenizer
    if not isinstance(prompt, str):
        if len(prompt) > policy.max_context * num_contexts:
            _check_length(prompt, policy)
        return {"role": "user", "content": exact_text(prompt, tokenizer, "prompt")}, prompt
    message = {"role": "user", "content": prompt}
    try:
        check_size([message], None, policy.size_limit(num_contexts))
    except ContextLengthError as error:
        raise ContextLengthError(f"`prompt` is too long: {error.message}", param="prompt") from error
    return message, tokenizer.encode(prompt, add_special_tokens=add_special_tokens)


def exact_text(token_ids: TokenIds, tokenizer: Tokenizer, param: str) -> str:
    """Return the text of tokens.

    Raises:
        InvalidRequestError: an id is no token; `param` is where it came from.
    """
    unknown = sorted(i for i in set(token_ids) if tokenizer.backend.id_to_token(i) is None)
    if unknown:
        raise InvalidRequestError(
            f"`{param}` has the id {unknown[0]}, which is no token of this model; its vocabulary has "
            f"{tokenizer.vocab_size} tokens",
            param=param,
        )
    return tokenizer.text(token_ids)


def _check_length(token_ids: TokenIds, policy: PolicyRef) -> None:
    if not token_ids:
        raise InvalidRequestError("`prompt` has no tokens; send a text", param="prompt")
    if len(token_ids) >= policy.max_context:
        raise ContextLengthError(
            f"`prompt` is {len(token_ids)} tokens long, and {policy.context} leaves no room for an answer; shorten it",
            param="prompt",
        )


def to_completion(request: CompletionRequest, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the `chat.completion` objects of the prompts to a `text_completion` object."""
    choices = [
        _choice(choice, p * request.choices_per_prompt, choice["message"]["content"], _Offsets())
        for p, answer in enumerate(answers)
        for choice in answer["choices"]
    ]
    return {**_envelope(answers[0]), "choices": choices, "usage": _sum([answer["usage"] for answer in answers])}


async def to_chunks(request: CompletionRequest, streams: Sequence[ChatStream]) -> AsyncGenerator[Chunk, None]:
    """Join the streams of the prompts to one of `text_completion` chunks, in the order in which their parts come."""
    offsets: dict[int, _Offsets] = {}
    usages: list[dict[str, Any]] = []
    envelope: dict[str, Any] | None = None
    include_usage = request.stream_options is not None and request.stream_options.include_usage
    async with contextlib.aclosing(_merge([stream.chunks for stream in streams])) as chunks:
        async for p, chunk in chunks:
            if envelope is None:
                envelope = _envelope(chunk) | ({"usage": None} if include_usage else {})
            if chunk.get("usage") is not None:
                usages.append(chunk["usage"])
            for part in chunk["choices"]:
                text, first = part["delta"].get("content") or "", p * request.choices_per_prompt
                if text or part["logprobs"] is not None or part["finish_reason"] is not None:
                    known = offsets.setdefault(first + part["index"], _Offsets())
                    yield {**envelope, "choices": [_choice(part, first, text, known)]}
    if envelope is not None and include_usage:
        yield {**envelope, "choices": [], "usage": _sum(usages)}


async def _merge(streams: Sequence[AsyncGenerator[Chunk, None]]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield the chunks of several streams with the number of their stream. If one fails, all are closed."""
    queue: asyncio.Queue[tuple[int, Chunk] | None] = asyncio.Queue()

    async def read(number: int, stream: AsyncGenerator[Chunk, None]) -> None:
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                queue.put_nowait((number, chunk))

    work = asyncio.ensure_future(all_of([partial(read, i, stream) for i, stream in enumerate(streams)]))
    work.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (entry := await queue.get()) is not None:
            yield entry
        await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def all_of(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Do several things at once. When one fails, or the caller is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(call()) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _envelope(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"cmpl-{os.urandom(12).hex()}",
        "object": "text_completion",
        "created": answer["created"],
        "model": answer["model"],
        "policy_version": answer["policy_version"],
    }


class _Offsets:
    """Finds where each token begins in the text of a choice, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def add(self, data: bytes) -> int:
        start = self._length
        self._length += len(self._decoder.decode(data))
        return start


def _choice(part: dict[str, Any], first: int, text: str, offsets: _Offsets) -> dict[str, Any]:
    """Translate a choice of a chat answer or chunk. `first` is the index of the first choice of its prompt."""
    choice = {
        "index": first + part["index"],
        "text": text,
        "finish_reason": part["finish_reason"],
        "logprobs": None if part["logprobs"] is None else _logprobs(part["logprobs"]["content"], offsets),
        "exchange_id": part["exchange_id"],
    }
    if "stop_reason" in part:
        choice["stop_reason"] = part["stop_reason"]
    return choice


def _logprobs(reports: list[dict[str, Any]], offsets: _Offsets) -> dict[str, Any]:
    """Translate log-prob entries of a chat answer. The token that ended the answer comes last."""
    tops = [{top["token"]: top["logprob"] for top in report["top_logprobs"]} for report in reports]
    for top, report in zip(tops, reports, strict=True):
        if top:  # the sampled token is always one of them
            top[report["token"]] = report["logprob"]
    return {
        "tokens": [report["token"] for report in reports],
        "token_logprobs": [report["logprob"] for report in reports],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": [offsets.add(bytes(report["bytes"])) for report in reports],
    }


def _sum(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total = {key: sum(usage[key] for usage in usages) for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {**total, "prompt_tokens_details": {"cached_tokens": cached}}
