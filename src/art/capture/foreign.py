"""Requests of clients that ART has not made are seen while a capture is open, by the `send` of httpx and httpx2.

No seam of these libraries reaches a client that somebody else has made, so this is the one place where a method of
another library is replaced: for as long as a capture is open, and without effect for code outside of it. The reasons
are in `docs/decisions/0008-clients-of-others-are-captured.md`.
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

from art.capture.clients import reader, see
from art.capture.http import keep, keep_async

_LIBRARIES = ("httpx", "httpx2")
_lock = threading.Lock()
_num_open = 0
_replaced: list[tuple[type, Callable[..., Any], Callable[..., Any]]] = []
"""A class, its own `send`, and the one that takes its place."""
_is_seen: ContextVar[bool] = ContextVar("art_capture_is_seen", default=False)
"""This request is looked at already, by a `send` that another program has kept and wrapped."""


@contextmanager
def watch_clients() -> Iterator[None]:
    """See the requests of all clients until the last such block of this process ends."""
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
        if client.__dict__.get("send") is watched:  # or somebody has wrapped it since: then it stays, and does nothing
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
        if (read := reader(model, response)) is not None:
            keep_async(response, read)
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
        if (read := reader(model, response)) is not None:
            keep(response, read)
        if not stream:
            try:
                response.read()
            except BaseException:
                response.close()
                raise
        return response

    return watched
