"""Threads for work on large requests, and large answers in pieces, so that the event loop goes on answering everybody
else. Small work is done at once, because a thread would cost more than it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import orjson
from pydantic import BaseModel
from pydantic_core import to_json, to_jsonable_python

P = ParamSpec("P")
T = TypeVar("T")

INLINE = 2**15
"""Characters or bytes up to which work is done at once. To render and tokenise them takes some 30 ms."""
_THREADS = 6


class Workers:
    """A pool of threads, which start when they are first needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "large-request")

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that works on `size` characters or bytes, and return its result. If the caller is cancelled,
        a call that has not begun never begins."""
        if size <= INLINE:
            return function(*args, **kwargs)
        return await asyncio.wrap_future(self._pool.submit(function, *args, **kwargs))


def json_pieces(value: Any, depth: int) -> Iterator[bytes]:
    """Yield the JSON text of a value, so that a large one neither is in memory a second time nor is encoded in one go.

    An encoder holds Python's lock until it has finished. Between two pieces other threads run.

    Args:
        depth: levels of models, lists and objects that are taken apart; what is inside them is one piece.

    Example: `b"".join(json_pieces({"a": [1, 2]}, 2))` is `b'{"a":[1,2]}'`, in pieces of one number.
    """
    if depth == 0 or not value or not isinstance(value, BaseModel | dict | list):
        is_model = isinstance(value, BaseModel)
        yield to_json(value, inf_nan_mode="null") if is_model else orjson.dumps(value, default=to_jsonable_python)
    elif isinstance(value, list):
        before = b"["
        for item in value:
            yield before
            yield from json_pieces(item, depth - 1)
            before = b","
        yield b"]"
    else:
        before = b"{"
        for name, item in value.items() if isinstance(value, dict) else value:
            yield before + orjson.dumps(name) + b":"
            yield from json_pieces(item, depth - 1)
            before = b","
        yield b"}"
