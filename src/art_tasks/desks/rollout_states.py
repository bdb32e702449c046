"""Keeps the states of an MCP server's rollouts apart, and runs such a server from the command line.

shops = RolloutStates(lambda: open_shop(PRODUCTS))
with shops.using(open_shop(others)) as shop:      # in this process: requests made in the block meet this shop
    ...
shops.serve(server, "a shop", 8020)               # over HTTP: each value of `x-rollout-id` has its own state
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

State = TypeVar("State")

MAX_STATES = 1000
"""Number of states to keep over HTTP; the oldest is dropped first."""


class RolloutStates(Generic[State]):
    """The states of one server: that of the current rollout, if it named itself, and else one for everybody.

    `make` makes the state that a new rollout finds.
    """

    def __init__(self, make: Callable[[], State]) -> None:
        self._make = make
        self._by_name: dict[str, State] = {}
        self._lock = threading.Lock()  # tools may run in threads
        self._used: ContextVar[State | None] = ContextVar("state", default=None)
        self._name: ContextVar[str] = ContextVar("rollout", default="")

    def current(self) -> State:
        """Return the state that the current request is about."""
        if (used := self._used.get()) is not None:
            return used
        name = self._name.get()
        with self._lock:
            if name not in self._by_name:
                if len(self._by_name) >= MAX_STATES:
                    del self._by_name[next(key for key in self._by_name if key)]
                self._by_name[name] = self._make()
            return self._by_name[name]

    @contextlib.contextmanager
    def using(self, state: State) -> Iterator[State]:
        """Let requests of the body, and of tasks that it starts, meet this state."""
        token = self._used.set(state)
        try:
            yield state
        finally:
            self._used.reset(token)

    @contextlib.contextmanager
    def fresh(self) -> Iterator[State]:
        """Let requests of the body meet a new state, as a rollout finds it."""
        with self.using(self._make()) as state:
            yield state

    def serve(self, server: Any, description: str | None, port: int) -> None:
        """Serve from the command line until the client or the user ends it: over stdio, or with `--http` over HTTP.

        Over HTTP, the header `x-rollout-id` names the rollout of a request.
        """
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--http", action="store_true", help="serve http://HOST:PORT/mcp instead of stdio")
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=port)
        args = parser.parse_args()
        if not args.http:
            server.run("stdio")
            return
        import uvicorn

        app = server.streamable_http_app(host=args.host)

        async def by_header(scope: Any, receive: Any, send: Any) -> None:
            self._name.set(dict(scope.get("headers", ())).get(b"x-rollout-id", b"").decode("latin-1"))
            await app(scope, receive, send)

        uvicorn.run(by_header, host=args.host, port=args.port, log_level="warning")
