"""Sees requests of other libraries' clients while a capture is open, by replacing `send` of httpx and httpx2.

These libraries have no hook for a client that another program made. So this is the one place where a method of
another library is replaced: only while a capture is open, and without effect for code outside it. The reasons are in
`docs/decisions/0008-clients-of-others-are-captured.md`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from art.capture.clients import copy_answer, see

_LIBRARIES = ("httpx", "httpx2")
_lock = threading.Lock()
_num_open = 0
_replaced: list[tuple[type, Callable[..., Any], Callable[..., Any]]] = []
"""Each class with its own `send` and the function that replaces it."""
_is_seen: ContextVar[bool] = ContextVar("art_capture_is_seen", default=False)
"""Whether an outer `send`, which another program kept and wrapped, already handles this request."""


@contextmanager
def watch_clients() -> Iterator[None]:
    """Context manager: while it is open, every request of an httpx or httpx2 client in this process is seen.

    A request inside a capture is then captured. Blocks may overlap: the libraries are restored when the last one ends.
    """
    global _num_open
    with _lock:
        _num_open += 1
        if _num_open == 1:
            _replace()
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            if not _num_open:
                _restore()


def _replace() -> None:
    for name in _LIBRARIES:
        if importlib.util.find_spec(name) is None:
            continue
        library = importlib.import_module(name)
        for client, watch in ((library.AsyncClient, _watch_async), (library.Client, _watch)):
            watched = watch(client.send)
            _replaced.append((client, client.send, watched))
            client.send = watched


def _restore() -> None:
    for client, send, watched in _replaced:
        if client.__dict__.get("send") is watched:  # if another program wrapped it since, it stays and does nothing
            client.send = send  # type: ignore[attr-defined]
    _replaced.clear()


def _watch_async(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    async def watched(client: Any, request: Any, *, stream: bool = False, **further: Any) -> Any:
        model = None if _is_seen.get() else see(client, request)
        if model is None:
            return await send(client, request, stream=stream, **further)
        token = _is_seen.set(True)
        try:
            response = await send(client, request, stream=True, **further)
        finally:
            _is_seen.reset(token)
        copy_answer(model, response)
        if not stream:
            try:
                await response.aread()
            except BaseException:
                await response.aclose()
                raise
        return response

    return watched


def _watch(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def watched(client: Any, request: Any, *, stream: bool = False, **further: Any) -> Any:
        model = None if _is_seen.get() else see(client, request)
        if model is None:
            return send(client, request, stream=stream, **further)
        token = _is_seen.set(True)
        try:
            response = send(client, request, stream=True, **further)
        finally:
            _is_seen.reset(token)
        copy_answer(model, response)
        if not stream:
            try:
                response.read()
            except BaseException:
                response.close()
                raise
        return response

    return watched
