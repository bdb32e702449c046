"""What the HTTP clients of models and servers share: a client for each event loop, and hooks."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

LOOPBACK = {"127.0.0.1", "::1", "localhost"}
"""Hosts that are this machine."""
EventHooks = Mapping[str, list[Callable[..., Any]]]
"""Hooks of an HTTP client: for `request` before it is sent, for `response` before it is read."""


class Hooks(NamedTuple):
    """Event hooks of an HTTP client, and when they are needed."""

    by_event: EventHooks
    are_needed: Callable[[], bool]
    """Whether the hooks would do something now. Requests may skip them while they would not."""


class PerLoop(Generic[T]):
    """Holds resources, such as HTTP clients, by running event loop and key, and closes each at the end of its loop.

    Connections belong to the event loop that opened them, and a notebook or a script may call `asyncio.run` several
    times. A copy begins without resources.
    """

    def __init__(self, close: Callable[[T], Awaitable[None]]) -> None:
        self._close = close
        self._held: weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[T, AsyncGenerator[None, None]]]] = (
            weakref.WeakKeyDictionary()
        )

    def get(self, make: Callable[[], T], key: Hashable = None) -> T:
        """Return the resource of the running event loop for `key`; `make` makes it at first use.

        Raises:
            RuntimeError: no event loop is running.
        """
        held = self._held.setdefault(asyncio.get_running_loop(), {})
        if key not in held:
            resource = make()
            keeper = self._keep(resource)
            with contextlib.suppress(StopIteration):
                keeper.__anext__().send(None)  # run to its yield, by which the running loop learns of the generator
            held[key] = resource, keeper
        return held[key][0]

    async def close(self) -> None:
        """Close the resources of the running event loop."""
        for _, keeper in self._held.pop(asyncio.get_running_loop(), {}).values():
            await keeper.aclose()

    async def _keep(self, resource: T) -> AsyncGenerator[None, None]:
        """Wait in the yield for the end of the loop: `asyncio.run` closes all async generators before it returns."""
        try:
            yield
        finally:
            await self._close(resource)

    def __deepcopy__(self, memo: Any) -> PerLoop[T]:
        return PerLoop(self._close)
