"""`client.chat.completions` with the light path."""

from __future__ import annotations

import functools
from typing import Any

from openai.resources.chat import AsyncChat
from openai.resources.chat.completions import AsyncCompletions

from art.client.light.handover import HandoverTransport
from art.client.light.way import LightWay


class LightCompletions(AsyncCompletions):
    """`AsyncCompletions` whose `create` sends plain requests by itself. What else it inherits goes through the SDK."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._way = LightWay(self)

    @functools.wraps(AsyncCompletions.create)
    async def create(self, *args: Any, **arguments: Any) -> Any:  # type: ignore[override]
        way = self._way
        body = None if args else way.body(arguments)
        if body is None:
            return await super().create(*args, **arguments)
        call = way.new_call()
        known = way.knows()
        if known and (answer := await way.ask(call, body)) is not None:
            return answer
        with call.under_way():
            answer = await super().create(**arguments)
        if not known:
            way.learn(call, body, answer)
        return answer


class LightChat(AsyncChat):
    """`AsyncChat` with `LightCompletions`."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._completions = LightCompletions(client)

    @functools.cached_property
    def completions(self) -> AsyncCompletions:
        return self._completions


def make_chat(client: Any) -> AsyncChat:
    """Make the `chat` of a client; the SDK's own if the light path lacks something that it needs."""
    http = getattr(client, "_client", None)
    if not isinstance(getattr(http, "_transport", None), HandoverTransport):
        return AsyncChat(client)  # the user's own HTTP client
    stock = AsyncCompletions(client)
    return LightChat(client) if hasattr(stock, "_post") and hasattr(stock, "_client") else AsyncChat(client)


def add_handover(http: Any) -> None:
    """Let the light path hand requests over to an HTTP client that was just made; nothing if it is not as expected."""
    inner = getattr(http, "_transport", None)
    if all(hasattr(inner, name) for name in ("client", "get_client", "handle_async_request")):
        http._transport = HandoverTransport(inner)
