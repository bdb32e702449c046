"""Checks of requests, so that a bad one is refused and cannot fail the batch that it would be part of."""

from __future__ import annotations

import math

from art.engine import EngineInfo, GenerateRequest
from art.errors import ContextLengthError, InvalidRequestError


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Check a request for a completion.

    Raises:
        InvalidRequestError: a parameter is out of range.
        ContextLengthError: the prompt leaves no room for a sampled token.
    """

    def refuse(param: str, expected: str) -> InvalidRequestError:
        return InvalidRequestError(f"`{param}` must be {expected}, got {getattr(request, param)!r}", param=param)

    check_tokens(request.prompt_token_ids, "prompt_token_ids", info)
    check_length(len(request.prompt_token_ids), info.max_context - 1, info)
    if request.max_tokens < 1:
        raise refuse("max_tokens", "at least 1")
    if not 0 <= request.temperature < math.inf:
        raise refuse("temperature", "a finite number of at least 0")
    if not 0 < request.top_p <= 1:
        raise refuse("top_p", "above 0 and at most 1")
    if not 0 <= request.num_top_logprobs <= info.vocab_size:
        raise refuse("num_top_logprobs", f"between 0 and {info.vocab_size}")
    if not 0 <= request.seed < 2**64:
        raise refuse("seed", "an unsigned 64-bit integer")
    if request.first_index < 0:
        raise refuse("first_index", "at least 0")


def check_tokens(token_ids: list[int], param: str, info: EngineInfo) -> None:
    if not token_ids:
        raise InvalidRequestError(f"`{param}` is empty; the model needs at least one token", param=param)
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        bad = next(t for t in token_ids if not 0 <= t < info.vocab_size)
        raise InvalidRequestError(
            f"`{param}` holds token {bad}; the vocabulary has ids 0 to {info.vocab_size - 1}", param=param
        )


def check_score(token_ids: list[int], info: EngineInfo) -> None:
    """Check a request for log-probs.

    Raises:
        InvalidRequestError: fewer than 2 tokens, or a token outside the vocabulary.
        ContextLengthError: more tokens than the context holds.
    """
    check_tokens(token_ids, "token_ids", info)
    if len(token_ids) < 2:
        raise InvalidRequestError(f"`token_ids` needs at least 2 tokens, got {len(token_ids)}", param="token_ids")
    check_length(len(token_ids), info.max_context, info)


def check_length(num_tokens: int, limit: int, info: EngineInfo) -> None:
    if num_tokens > limit:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens, but the model's context of {info.max_context} tokens must hold "
            f"prompt and completion, so a prompt may have at most {limit}; shorten it",
            param="messages",
        )
