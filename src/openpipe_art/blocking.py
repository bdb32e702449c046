"""Runs asynchronous work for code without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def start_blocking(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine: in a thread if an event loop runs here (a notebook), else run it to its end."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        future: Future[T] = Future()
        future.set_result(asyncio.run(work))
        return future
    thread = ThreadPoolExecutor(max_workers=1)
    try:
        return thread.submit(asyncio.run, work)
    finally:
        thread.shutdown(wait=False)


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, with or without a running event loop, wait for its end and return its result."""
    return start_blocking(work).result()
