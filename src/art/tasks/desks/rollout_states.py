"""Keeps the states of an MCP server's rollouts apart, and runs such a server from the command line.

shops = RolloutStates(lambda: open_shop(PRODUCTS))
with shops.using(open_shop(others)) as shop:      # in this process: requests made in the block meet this shop
    ...
run_server(server, args, shops.by_header)         # over HTTP: each value of `x-rollout-id` has its own state
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
    """The states of one server: that of the current rollout, if it named itself, and else one for everybody."""

    def __init__(self, make: Callable[[], State]) -> None:
        """
        Args:
            make: makes the state that a new rollout finds.
        """
        self._make = make
        self._by_name: dict[str, State] = {}
        self._lock = threading.Lock()  # tools may run in threads
        self._used: ContextVar[State | None] = ContextVar("state", default=None)
        self._name: ContextVar[str] = ContextVar("rollout", default="")

    def current(self) -> State:
        """Return the state that the current request is about."""
        used = self._used.get()
        if used is not None:
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

    def share(self, state: State) -> None:
        """Set the state of all that name no rollout."""
        self._by_name[""] = state

    def by_header(self, app: Any) -> Any:
        """Wrap an ASGI app: the header `x-rollout-id` names the rollout of a request."""

        async def wrapped(scope: Any, receive: Any, send: Any) -> None:
            self._name.set(dict(scope.get("headers", ())).get(b"x-rollout-id", b"").decode("latin-1"))
            await app(scope, receive, send)

        return wrapped


def parse_server_options(description: str | None, port: int, **options: Any) -> argparse.Namespace:
    """Read the command line of a server: `--http`, `--host`, `--port`, and further options with their settings."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--http", action="store_true", help="serve http://HOST:PORT/mcp instead of stdio")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=port)
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_args()


def run_server(server: Any, args: argparse.Namespace, wrap: Callable[[Any], Any]) -> None:
    """Serve over stdio or HTTP until the client or the user ends it. `wrap` goes around the HTTP app."""
    if not args.http:
        server.run("stdio")
        return
    import uvicorn

    uvicorn.run(wrap(server.streamable_http_app(host=args.host)), host=args.host, port=args.port, log_level="warning")
