"""JSON text in pieces, so that a large value neither is in memory a second time nor is encoded in one go.

An encoder holds Python's lock until it has finished. Between two pieces other threads run, and an event loop can answer
other requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic_core import to_json, to_jsonable_python


def json_pieces(value: Any, depth: int) -> Iterator[bytes]:
    """Yield the JSON text of a value.

    Args:
        depth: levels of models, lists and objects that are taken apart; what is inside them is one piece.

    Example: `b"".join(json_pieces({"a": [1, 2]}, 2))` is `b'{"a":[1,2]}'`, in pieces of one number.
    """
    if depth == 0 or not value or not isinstance(value, BaseModel | dict | list):
        yield _dump(value)
    elif isinstance(value, list):
        yield from _list(value, depth)
    else:
        yield from _object(value.items() if isinstance(value, dict) else value, depth)


def _dump(value: Any) -> bytes:
    if isinstance(value, BaseModel):
        return to_json(value, inf_nan_mode="null")
    return orjson.dumps(value, default=to_jsonable_python)


def _list(items: list[Any], depth: int) -> Iterator[bytes]:
    before = b"["
    for item in items:
        yield before
        yield from json_pieces(item, depth - 1)
        before = b","
    yield b"]"


def _object(fields: Iterable[tuple[str, Any]], depth: int) -> Iterator[bytes]:
    before = b"{"
    for name, value in fields:
        yield before + orjson.dumps(name) + b":"
        yield from json_pieces(value, depth - 1)
        before = b","
    yield b"}"
