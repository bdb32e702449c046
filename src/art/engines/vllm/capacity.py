"""How many tokens of scored prompts a vLLM server can compute at once on its GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_SCORED_TOKENS = 32_768
"""Tokens of prompts that a server scores at once."""
MAX_SCORED_PROMPTS = 8
LOGIT_BYTES = 2**30
"""Memory for the logits of one piece of a scored prompt. vLLM computes them in one tensor, outside its memory share."""
BYTES_PER_LOGIT = 10
"""Bytes of a logit in bfloat16, and of its log-prob in float32 twice."""
SMALLEST_PIECE = 512


def choose_prefill_piece(vocab_size: int, context: int) -> int:
    """Choose the most tokens of one prompt that vLLM computes in one step, `long_prefill_token_threshold`.

    A scored prompt needs the logits of all tokens of a piece at once: 8,192 tokens of a vocabulary of 151,936 are 12 GB
    that vLLM has not reserved, and the server ends for want of memory.
    """
    piece = LOGIT_BYTES // (BYTES_PER_LOGIT * vocab_size)
    return min(context, max(SMALLEST_PIECE, 1 << max(0, piece.bit_length() - 1)))


class ScoreLimit:
    """Bounds how many prompts, and tokens of them, one server scores at once. It belongs to one event loop."""

    def __init__(self, max_tokens: int = MAX_SCORED_TOKENS, max_prompts: int = MAX_SCORED_PROMPTS) -> None:
        self._max_tokens = max_tokens
        self._prompts = asyncio.Semaphore(max_prompts)
        self._changed = asyncio.Condition()
        self.num_tokens = 0
        """Tokens that are being scored."""

    @asynccontextmanager
    async def taken(self, num_tokens: int) -> AsyncIterator[None]:
        """Wait for room, and hold it during the body. A prompt that is longer than the limit is scored alone."""
        async with self._prompts:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: not self.num_tokens or self.num_tokens + num_tokens <= self._max_tokens
                )
                self.num_tokens += num_tokens
            try:
                yield
            finally:
                self.num_tokens -= num_tokens
                async with self._changed:
                    self._changed.notify_all()
