"""Helpers of engines: the whole of an answer, and checks of requests, so that one bad request cannot fail the whole
batch that it would be computed in."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

from art.engine import EngineInfo, GenerateRequest, TokenChunk
from art.errors import ContextLengthError, InvalidRequestError


async def only_chunk(chunks: AsyncGenerator[TokenChunk, None]) -> TokenChunk:
    """Return the one chunk of an answer that is not streamed; an empty one, without a finish reason, if none comes."""
    async with aclosing(chunks):
        async for chunk in chunks:
            return chunk
    return TokenChunk(token_ids=[], logprobs=[])


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Check that the engine described by `info` can serve a request to generate.

    Raises:
        InvalidRequestError: a parameter is out of range, or the engine does not honour it.
        ContextLengthError: the prompt leaves no room for a single new token.
    """
    _check_tokens(request.prompt_token_ids, "prompt_token_ids", info)
    _check_length(len(request.prompt_token_ids), info.max_context - 1, info)
    for param, is_valid, expected in (
        ("max_tokens", request.max_tokens >= 1, "at least 1"),
        ("temperature", 0 <= request.temperature < math.inf, "a finite number of at least 0"),
        ("top_p", 0 < request.top_p <= 1, "above 0 and at most 1"),
        ("num_top_logprobs", 0 <= request.num_top_logprobs <= info.vocab_size, f"between 0 and {info.vocab_size}"),
        ("seed", 0 <= request.seed < 2**64, "an unsigned 64-bit integer"),
        ("top_k", request.top_k >= 0, "at least 0"),
        ("min_p", 0 <= request.min_p <= 1, "between 0 and 1"),
        ("chunk_every_s", 0 <= request.chunk_every_s < math.inf, "a finite number of seconds, at least 0"),
        ("first_index", 0 <= request.first_index <= len(request.prompt_token_ids), "the number of tokens drawn so far"),
    ):
        if not is_valid:
            raise InvalidRequestError(f"`{param}` must be {expected}, got {getattr(request, param)!r}", param=param)
    for param, is_honoured in (
        ("grammar", info.grammars or request.grammar is None),
        ("top_k", info.reports_kept or request.top_k == 0),
        ("min_p", info.reports_kept or request.min_p == 0.0),
    ):
        if not is_honoured:
            raise InvalidRequestError(f"this engine does not honour `{param}`; leave it out", param=param)


def _check_tokens(token_ids: list[int], param: str, info: EngineInfo) -> None:
    if not token_ids:
        raise InvalidRequestError(f"`{param}` is empty; the model needs at least one token", param=param)
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        bad = next(t for t in token_ids if not 0 <= t < info.vocab_size)
        raise InvalidRequestError(
            f"`{param}` contains token id {bad}; the vocabulary has ids 0 to {info.vocab_size - 1}", param=param
        )


def check_score(token_ids: list[int], info: EngineInfo) -> None:
    """Check that the engine described by `info` can compute the log-probs of the sequence `token_ids`.

    Raises:
        InvalidRequestError: there are fewer than 2 tokens, or a token is outside the vocabulary.
        ContextLengthError: there are more tokens than the context holds.
    """
    _check_tokens(token_ids, "token_ids", info)
    if len(token_ids) < 2:
        raise InvalidRequestError(f"`token_ids` needs at least 2 tokens, got {len(token_ids)}", param="token_ids")
    _check_length(len(token_ids), info.max_context, info)


def _check_length(num_tokens: int, limit: int, info: EngineInfo) -> None:
    if num_tokens > limit:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens, but at most {limit} fit into the model's context of "
            f"{info.max_context} tokens together with the completion; shorten the prompt",
            param="messages",
        )
