"""Headers of every answer: a request id, and for pages of named origins the permission to read it (CORS).

request   x-request-id: job-7    origin: https://lab.example
answer    x-request-id: job-7    access-control-allow-origin: https://lab.example    vary: origin
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from art.server.asgi import Scope, Send, header

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PREFLIGHT_AGE_S = 600


def request_id(scope: Scope) -> str:
    """The `x-request-id` of a request, or an id of our own if it has none that is safe to log and to send back."""
    sent = header(scope, b"x-request-id")
    return sent if sent is not None and _SANE_ID.fullmatch(sent) else f"req_{os.urandom(12).hex()}"


def with_headers(
    scope: Scope, send: Send, identity: str, origins: Collection[str], more: Mapping[str, str] = {}
) -> Send:
    """Wrap `send` so that answers carry the request id, `more` headers and, for one of `origins`, the headers of CORS.

    `more` is read when the answer begins. The answer to a HEAD request loses its body and keeps its headers.
    """
    # Anthropic's clients read the id from `request-id`, OpenAI's from `x-request-id`.
    extra = [(b"x-request-id", identity.encode()), (b"request-id", identity.encode())]
    origin = allowed_origin(scope, origins)
    if origin is not None:
        extra += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", b"*")]
    if origins:
        extra.append((b"vary", b"origin"))
    is_head = scope["method"] == "HEAD"

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            added = [(name.encode(), value.encode()) for name, value in more.items()]
            message["headers"] = [*message.get("headers", ()), *extra, *added]
        elif is_head:
            message["body"] = b""
        await send(message)

    return send_with_headers


def allowed_origin(scope: Scope, origins: Collection[str]) -> bytes | None:
    """The origin of a page that may read the answer; `None` for any other request."""
    origin = header(scope, b"origin") if origins else None
    return origin.encode("latin-1") if origin is not None and origin in origins else None


def is_preflight(scope: Scope, origins: Collection[str]) -> bool:
    """Whether a browser asks what a page of an allowed origin may send. Such a request has no key."""
    asks = scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method") is not None
    return asks and allowed_origin(scope, origins) is not None


async def answer_preflight(scope: Scope, send: Send) -> None:
    """Allow every method and header. Keys still decide what the request itself may do."""
    asked = header(scope, b"access-control-request-headers") or "authorization, content-type"
    headers = [
        (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, DELETE"),
        (b"access-control-allow-headers", asked.encode("latin-1")),
        (b"access-control-max-age", b"%d" % _PREFLIGHT_AGE_S),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
