"""Sample one answer with the newest weights at each moment, for clients that ask for it (`x-art-in-flight: switch`).

    tokens of step 3   tokens of step 4          the answer, as the client gets it
    [a b c d]          [e f g]                   a b c d e f g          segments (3, 4), (4, 3)
             ^ step 4 is published

Once a newer step is published, the request to the engine ends after the tokens that have arrived, and a new one goes on
under the new weights: its prompt is the old one and these tokens. Their keys and values are computed again. Each token
keeps the log-prob that it was drawn with, so its importance ratio is exact. The random number of token i depends on
(seed, i) as before. A request that waits for the engine, which has sampled none of its tokens, switches too, after its
first tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from art.engine import GenerateRequest, TokenChunk
from art.gateway.policies import ModelResolver, PolicyRef
from art.gateway.record.recorded_answers import Segments, join_segments


class SwitchingAnswer:
    """One answer that goes on with new weights when a step is published."""

    def __init__(
        self, model: str, policy: PolicyRef, resolver: ModelResolver, find_policy: Callable[[], Awaitable[PolicyRef]]
    ) -> None:
        """
        Args:
            model: name of the model in the request. With `@step` it always means the same weights.
            find_policy: returns the policy that the request means now, once it can be sampled from.
        """
        self._model, self._policy = model, policy
        self._resolver, self._find_policy = resolver, find_policy
        self._parts: Segments = []

    @property
    def first_version(self) -> int:
        """Step that sampled the first token."""
        return next((step for step, count in self._parts if count), self._policy.policy_version)

    def segments(self, num_tokens: int) -> Segments:
        """Step and number of tokens of each part of the answer's first `num_tokens`; empty if it is one step."""
        left, parts = num_tokens, list[tuple[int, int]]()
        for step, count in self._parts:
            parts.append((step, min(count, left)))
            left -= parts[-1][1]
        return join_segments(parts)

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the answer to `request`, as `Engine.generate` does with `stream`. The errors are those of it."""
        received: list[int] = []
        for number in itertools.count():
            part = request if number == 0 else _go_on(request, self._policy, received, number)
            generator = self._policy.engine.generate(part, stream=True)
            async with aclosing(cast("AsyncGenerator[TokenChunk, None]", generator)) as chunks:
                async for chunk in chunks:
                    received += chunk.token_ids
                    self._parts.append((self._policy.policy_version, len(chunk.token_ids)))
                    yield chunk if number == 0 else _of_whole(chunk, request)
                    if chunk.finish_reason is not None:
                        return
                    if await self._is_replaced():
                        break
                else:
                    return  # the engine ended without a finish reason, which the caller reports
            self._policy = await self._find_policy()

    async def _is_replaced(self) -> bool:
        """Whether the model means other weights now, or is about to: these cannot come while the old ones are used."""
        newest = self._resolver.resolve_ready(self._model)
        if newest is None and self._resolver.is_ready(self._policy):
            newest = await self._find_policy()
        return newest is None or newest.policy_version != self._policy.policy_version


def _go_on(request: GenerateRequest, policy: PolicyRef, received: list[int], number: int) -> GenerateRequest:
    return replace(
        request,
        request_id=f"{request.request_id}-{number}",
        adapter=policy.adapter,
        prompt_token_ids=request.prompt_token_ids + received,
        max_tokens=request.max_tokens - len(received),
        first_index=request.first_index + len(received),
    )


def _of_whole(chunk: TokenChunk, request: GenerateRequest) -> TokenChunk:
    """A chunk of a later part: what it says of time and cache is not that of the whole request."""
    num_cached = min(chunk.num_cached_tokens, len(request.prompt_token_ids))
    return replace(chunk, timings=None, num_cached_tokens=num_cached)
