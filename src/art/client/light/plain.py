"""Bodies of plain requests: JSON values that OpenAI's client sends as they are."""

from __future__ import annotations

import math
from typing import Any

import orjson
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall

_ANSWERED = (ChatCompletionMessage, ChatCompletionMessageFunctionToolCall)
"""Parts of answers, which agents put into their next request."""


def dump(body: dict[str, Any]) -> bytes | None:
    """Return the JSON of a request's body; `None` unless it consists of plain values and messages of answers.

    Values of other types are left to OpenAI's client, which rewrites some (generators, pydantic models, omitted
    arguments), and refuses others (NaN).
    """
    if not _is_plain(body):
        return None
    try:
        return orjson.dumps(body, default=_dump_answered)
    except orjson.JSONEncodeError:  # an integer above 64 bits, or half of a surrogate pair
        return None


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return True
    if kind is dict:
        for key, item in value.items():  # noqa: SIM110  `all` would take half as long again
            if type(key) is not str or not _is_plain(item):
                return False
        return True
    if kind is list:
        for item in value:  # noqa: SIM110
            if not _is_plain(item):
                return False
        return True
    return math.isfinite(value) if kind is float else kind in _ANSWERED


def _dump_answered(part: Any) -> Any:
    """What OpenAI's client makes of them."""
    return part.model_dump(mode="json", exclude_unset=True)
