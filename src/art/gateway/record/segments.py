"""Parts of an answer that different steps sampled, because a step was published while the answer was being sampled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import orjson

Segments: TypeAlias = list[tuple[int, int]]
"""Step and number of tokens of each part, in order.

Example: [(3, 40), (4, 25)] for 65 tokens, of which step 3 sampled the first 40.
"""


def pack_segments(segments: Segments) -> str | None:
    """Return the value of the column `segments`: `None` where one step sampled the whole answer."""
    return orjson.dumps(segments).decode() if segments else None


def unpack_segments(value: str | None) -> Segments:
    """Read a value of the column `segments`."""
    return [] if value is None else [(step, num_tokens) for step, num_tokens in orjson.loads(value)]


def join_segments(parts: Iterable[tuple[int, int]]) -> Segments:
    """Join neighbouring parts of the same step. Return an empty list if one step sampled all tokens."""
    joined: Segments = []
    for step, num_tokens in parts:
        if joined and joined[-1][0] == step:
            joined[-1] = (step, joined[-1][1] + num_tokens)
        elif num_tokens:
            joined.append((step, num_tokens))
    return joined if len(joined) > 1 else []
