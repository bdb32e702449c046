"""`LightWay`: sends plain chat requests of one client as the SDK has sent the first one."""

from __future__ import annotations

import inspect
import logging
import sys
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import openai
import orjson
from multidict import CIMultiDict
from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletion
from pydantic import TypeAdapter, ValidationError
from yarl import URL

from art.client.http import Hooks
from art.client.light.handover import Call, HandoverTransport, Outcome
from art.client.light.plain import dump
from art.client.light.untouched import Original, hides_method

logger = logging.getLogger(__name__)

_ANSWER = TypeAdapter(ChatCompletion)
_SPECIAL = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
"""Arguments of `create` that do not simply go into the body."""
_SDK_LOG = logging.getLogger("openai._base_client")


@dataclass(frozen=True, slots=True)
class Learned:
    """What the SDK sent for one plain request, and the state of the clients that made it so."""

    url: URL
    headers: CIMultiDict[str]
    timeout: aiohttp.ClientTimeout
    client: dict[str, Any]
    """Attributes of the `AsyncOpenAI`, such as API key and time limits."""
    http: dict[str, Any]
    """Attributes of its HTTP client."""
    http_headers: list[tuple[bytes, bytes]]
    send: Original
    library: logging.Logger
    """Logger of the HTTP library, which tells of each request."""


class LightWay:
    """The light path of one client's `chat.completions`."""

    def __init__(self, completions: AsyncCompletions) -> None:
        self._completions = completions
        self._client = cast(Any, completions._client)  # `clients.AsyncOpenAI`
        self._hooks = cast(Hooks, self._client.hooks)
        self._http: Any = self._client._client
        self._transport = cast(HandoverTransport, self._http._transport)
        self._keys = inspect.signature(AsyncCompletions.create).parameters.keys() - _SPECIAL
        self._learned: Learned | None = None
        self._has_warned = False
        self._originals = [
            Original(AsyncCompletions, "create", openai),
            Original(self._client.sdk_class, "post", openai),
            Original(self._client.sdk_class, "request", openai),
        ]

    def body(self, arguments: dict[str, Any]) -> bytes | None:
        """Return the body of a request that may take the light path now; `None` for one that may not."""
        if not (arguments.keys() <= self._keys and self._is_unseen()):
            return None
        if "model" not in arguments or "messages" not in arguments or arguments.get("stream", False) is not False:
            return None
        return dump(arguments)

    def _is_unseen(self) -> bool:
        """Whether nothing else wants to see the request: hooks, captures, tracers, mocks, a debug log."""
        return (
            not self._hooks.are_needed()
            and all(original.is_in_place() for original in self._originals)
            and self._completions._post == self._client.post
            and "handle_async_request" not in vars(self._transport)
            and self._http.event_hooks == self._hooks.by_event
            and not self._http.cookies
            and not _SDK_LOG.isEnabledFor(logging.DEBUG)
        )

    def new_call(self) -> Call:
        return Call(headers=self._client.rollout_headers())

    def knows(self) -> bool:
        """Whether a request of the SDK was seen, and since then nothing has changed that goes into one."""
        known = self._learned
        return (
            known is not None
            and vars(self._client) == known.client
            and vars(self._http) == known.http
            and self._http.headers.raw == known.http_headers
            and known.send.is_in_place()
        )

    def learn(self, call: Call, body: bytes, answer: Any) -> None:
        """Learn from a call that the SDK has made."""
        self._learned = None
        if len(call.answered) != 1 or hides_method(self._client) or hides_method(self._http):
            return  # it was repeated or redirected, or went through a proxy; or somebody watches
        request = call.answered[0]
        if orjson.loads(request.content) != orjson.loads(body) or not _reads_alike(answer):
            if not self._has_warned:
                logger.warning("openai %s sends or reads plain requests in a way of its own", openai.__version__)
            self._has_warned = True
            return
        headers = CIMultiDict(request.headers)
        for name in ("content-length", *call.headers):
            headers.popall(name, None)
        if any("idempotency" in name.lower() for name in headers):
            return
        times = request.extensions.get("timeout", {})
        library = sys.modules[type(request).__module__.partition(".")[0]]
        self._learned = Learned(
            url=URL(str(request.url)),
            headers=headers,
            timeout=aiohttp.ClientTimeout(
                sock_connect=times.get("connect"), sock_read=times.get("read"), connect=times.get("pool")
            ),
            client={key: dict(value) if type(value) is dict else value for key, value in vars(self._client).items()},
            http=dict(vars(self._http)),
            http_headers=self._http.headers.raw,
            send=Original(library.AsyncClient, "send", library),
            library=logging.getLogger(library.__name__),
        )

    async def ask(self, call: Call, body: bytes) -> ChatCompletion | None:
        """Send a request. Return its answer, or leave its end in `call` for the SDK and return `None`."""
        known = self._learned
        assert known is not None
        headers = known.headers
        if call.headers:
            headers = headers.copy()
            headers.update(call.headers)
        try:
            async with self._transport.inner.client.request(
                "POST", known.url, data=body, headers=headers, timeout=known.timeout, allow_redirects=False,
                auto_decompress=False, compress=False,
            ) as response:  # fmt: skip
                content = await response.read()
        except Exception as error:
            call.outcome = Outcome(error=error)
            return None
        if response.status == 200 and _is_plain_json(response.headers):
            try:
                answer = _ANSWER.validate_json(content, strict=True)
            except ValidationError:
                pass
            else:
                answer._request_id = response.headers.get("x-request-id")
                known.library.info(
                    'HTTP Request: %s %s "%s %d %s"', "POST", known.url, "HTTP/1.1", 200, response.reason
                )
                return answer
        call.outcome = Outcome(
            status=response.status, reason=response.reason, raw_headers=response.raw_headers, body=content
        )
        return None


def _is_plain_json(headers: Any) -> bool:
    """Whether an answer is JSON, and has no part that the HTTP client would have to handle."""
    kind = headers.get("content-type", "").partition(";")[0]
    return kind.endswith("json") and "content-encoding" not in headers and "set-cookie" not in headers


def _reads_alike(answer: Any) -> bool:
    """Whether the JSON of an answer is read here as the SDK has read it. True if only the SDK can read the answer."""
    if not isinstance(answer, ChatCompletion):
        return True
    try:
        content = answer.model_dump_json(exclude_unset=True, warnings=False)
        return _ANSWER.validate_json(content, strict=True).to_dict() == answer.to_dict()
    except ValueError:  # it does not fit OpenAI's types, or is no Unicode
        return True
