"""OpenAI clients for agents: patient with a server that restarts, with the headers of rollouts, cheap per request.

The light path sends plain chat requests as the SDK has sent the first one, and reads plain answers itself. For anything
else the SDK goes on: a transport below its HTTP client shows what it sends, and hands a request over to it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

import httpx2
import openai
from openai.resources.chat import AsyncChat
from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from pydantic import TypeAdapter, ValidationError

from art.client.http import LOOPBACK, EventHooks, Hooks
from art.client.rollout_context import request_headers
from art.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp
    from multidict import CIMultiDict
    from yarl import URL


TIMEOUT_S = 1200.0
CONNECT_TIMEOUT_S = 5.0
MAX_RETRIES = 30
"""Retries of a request. With the back-off of OpenAI's client, from 0.5 s to 8 s, they last about 3.5 minutes."""
MAX_CONNECTIONS = 10_000
STOCK_CLIENT = "ART_STOCK_CLIENT"
"""Environment variable: with `1`, all requests of `openai_client()` go through OpenAI's client."""
_SDK_CLASS = openai.AsyncOpenAI
"""The SDK's own class, also where another library has put one of its own under that name since."""
_NEW_AUTHENTICATION = {"provider", "workload_identity", "_extra_kwargs"}
"""Arguments of `copy` with which headers may differ from request to request."""


class AsyncOpenAI(openai.AsyncOpenAI):
    """An `AsyncOpenAI` whose requests carry the headers of the rollout that sends them."""

    asked_model: str = ""
    """`project/name` of the model that the client is for."""
    asks_logprobs: bool = False
    """Whether each chat request asks for log-probs, unless it says something else itself."""
    hooks: Hooks | None = None
    """Hooks that allow the light path; `None` without it."""

    async def request(self, cast_to: Any, options: Any, **how: Any) -> Any:
        call = current_call.get()
        if call is not None:
            headers = call.headers  # of the first attempt, which the light path has made
        else:
            headers = request_headers(self.asked_model) if options.method == "post" else {}
        return await super().request(cast_to, _changed(options, headers, self.asks_logprobs), **how)

    @functools.cached_property
    def chat(self) -> AsyncChat:
        return super().chat if self.hooks is None else make_chat(self)

    @functools.wraps(openai.AsyncOpenAI.copy)
    def copy(self, **changes: Any) -> AsyncOpenAI:  # type: ignore[override]
        copied = super().copy(**changes)
        copied.asked_model, copied.asks_logprobs = self.asked_model, self.asks_logprobs
        if not (_NEW_AUTHENTICATION & changes.keys() or callable(changes.get("api_key"))):
            copied.hooks = self.hooks
        return copied

    with_options = copy  # type: ignore[assignment]


class OpenAI(openai.OpenAI):
    """An `OpenAI` whose requests carry the headers of the rollout that sends them."""

    asked_model: str = ""
    asks_logprobs: bool = False

    def request(self, cast_to: Any, options: Any, **how: Any) -> Any:
        headers = request_headers(self.asked_model) if options.method == "post" else {}
        return super().request(cast_to, _changed(options, headers, self.asks_logprobs), **how)

    @functools.wraps(openai.OpenAI.copy)
    def copy(self, **changes: Any) -> OpenAI:  # type: ignore[override]
        copied = super().copy(**changes)
        copied.asked_model, copied.asks_logprobs = self.asked_model, self.asks_logprobs
        return copied

    with_options = copy  # type: ignore[assignment]


def _changed(options: Any, headers: Mapping[str, str], asks_logprobs: bool) -> Any:
    """Options of a request with further headers and log-probs. What the caller has given himself wins."""
    body = options.json_data
    is_chat = options.url.endswith("/chat/completions") and isinstance(body, Mapping)
    asks_logprobs = asks_logprobs and is_chat and "logprobs" not in body
    if headers or asks_logprobs:
        options = options.model_copy()
    if headers:
        options.headers = {**headers, **(options.headers or {})}
    if asks_logprobs:
        options.json_data = {**body, "logprobs": True}
    return options


def make_openai_client(
    base_url: str, api_key: str, hooks: Hooks | None = None, model: str = "", *, logprobs: bool = False
) -> AsyncOpenAI:
    """Make an `AsyncOpenAI` for many concurrent requests. Use it in one event loop only, and close it there.

    If aiohttp is installed, requests are sent through it, which takes about half the CPU time. With orjson too, plain
    chat requests take the light path (see above), which takes an eighth of that.

    Args:
        hooks: hooks of the HTTP client.
        model, logprobs: as in `ModelAddress`.

    Raises:
        ConfigError: `ART_STOCK_CLIENT` is neither 0 nor 1.
    """
    if (stock := os.environ.get(STOCK_CLIENT, "")) not in ("", "0", "1"):
        raise ConfigError(f"{STOCK_CLIENT} must be 1 (only OpenAI's client) or 0 (the default), got {stock!r}")
    hooks = hooks or Hooks({"request": [], "response": []}, lambda: False)
    # Before version 3, which litellm does not support yet, openai needs a separate adapter for aiohttp.
    adapter = "aiohttp" if int(openai.__version__.partition(".")[0]) >= 3 else "httpx_aiohttp"
    has_aiohttp = importlib.util.find_spec(adapter) is not None
    make_http = openai.DefaultAioHttpClient if has_aiohttp else openai.DefaultAsyncHttpxClient
    options = _options(base_url, api_key, hooks.by_event, make_http)
    client = AsyncOpenAI(**options)
    client.asked_model, client.asks_logprobs = model, logprobs
    if has_aiohttp and not logprobs and stock != "1" and importlib.util.find_spec("orjson") is not None:
        add_handover(options["http_client"])
        client.hooks = hooks
    return client


def make_blocking_openai_client(
    base_url: str, api_key: str, event_hooks: EventHooks | None = None, model: str = "", *, logprobs: bool = False
) -> OpenAI:
    """Make an `OpenAI` client for code that blocks. Several threads may use it; the caller closes it."""
    client = OpenAI(**_options(base_url, api_key, event_hooks, openai.DefaultHttpxClient))
    client.asked_model, client.asks_logprobs = model, logprobs
    return client


def _options(
    base_url: str, api_key: str, event_hooks: EventHooks | None, make_http: Callable[..., Any]
) -> dict[str, Any]:
    timeout = openai.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    http_client = make_http(
        timeout=timeout,
        limits=httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS),
        trust_env=urlsplit(base_url).hostname not in LOOPBACK,  # a proxy cannot reach this machine's loopback
        event_hooks=event_hooks,
    )
    return {
        "base_url": base_url, "api_key": api_key, "timeout": timeout, "max_retries": MAX_RETRIES,
        "http_client": http_client,
    }  # fmt: skip


# -- what the light path and the SDK tell each other --


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The end of a request that the light path sent: an answer or an error of aiohttp.

    It has the parts of aiohttp's session and response that the SDK's adapter uses. So the adapter makes of it what it
    makes of its own requests: the answer, or the error of its HTTP library.
    """

    error: Exception | None = None
    status: int = 0
    reason: str | None = None
    raw_headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""

    def request(self, **_: Any) -> Self:
        return self

    async def __aenter__(self) -> Self:
        if self.error is not None:
            raise self.error
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open: the body was read."""

    @property
    def content(self) -> Self:
        return self

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        yield self.body


@dataclass(slots=True, kw_only=True)
class SdkCall:
    """One call of `create` that goes through the SDK, seen from below its HTTP client."""

    headers: Mapping[str, str]
    """Headers that the request has because of the rollout that sends it. All attempts have the same."""
    outcome: Outcome | None = None
    """End of the first attempt, if the light path has made it."""
    answered: list[Any] = field(default_factory=list)
    """Requests (`httpx2.Request`, before version 3 of the SDK `httpx.Request`) that were sent and answered."""

    @contextlib.contextmanager
    def under_way(self) -> Iterator[Self]:
        """Context manager: requests of the body belong to this call."""
        token = current_call.set(self)
        try:
            yield self
        finally:
            current_call.reset(token)


current_call: ContextVar[SdkCall | None] = ContextVar("art_openai_call", default=None)


class HandoverTransport(httpx2.AsyncBaseTransport):
    """Passes requests on to the transport of aiohttp, except the first attempt of a call that the light path made."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        """The SDK's transport. Its `client` is the aiohttp session, once a request was sent."""

    async def handle_async_request(self, request: Any) -> Any:
        call = current_call.get()
        if call is None:
            return await self.inner.handle_async_request(request)
        if call.outcome is not None:
            outcome, call.outcome = call.outcome, None
            adapter = copy.copy(self.inner)
            adapter.client = lambda: outcome
            return await adapter.handle_async_request(request)
        response = await self.inner.handle_async_request(request)
        call.answered.append(request)
        return response

    async def aclose(self) -> None:
        await self.inner.aclose()


def add_handover(http: Any) -> None:
    """Let the light path hand requests over to an HTTP client that was just made; nothing if it is not as expected."""
    inner = getattr(http, "_transport", None)
    if all(hasattr(inner, name) for name in ("client", "get_client", "handle_async_request")):
        http._transport = HandoverTransport(inner)


# -- the light path --

_ANSWER = TypeAdapter(ChatCompletion)
_SPECIAL = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
"""Arguments of `create` that do not simply go into the body."""
_SDK_LOG = logging.getLogger("openai._base_client")
_ANSWERED = (ChatCompletionMessage, ChatCompletionMessageFunctionToolCall)
"""Parts of answers, which agents put into their next request."""


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


class LightCompletions(AsyncCompletions):
    """`AsyncCompletions` whose `create` sends plain requests by itself. What else it inherits goes through the SDK."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._openai = cast(AsyncOpenAI, client)
        self._hooks = cast("Hooks", self._openai.hooks)
        self._http: Any = client._client
        self._transport = cast(HandoverTransport, self._http._transport)
        self._keys = inspect.signature(AsyncCompletions.create).parameters.keys() - _SPECIAL
        self._learned: Learned | None = None
        self._originals = [
            Original(AsyncCompletions, "create", openai),
            Original(_SDK_CLASS, "post", openai),
            Original(_SDK_CLASS, "request", openai),
        ]

    @functools.wraps(AsyncCompletions.create)
    async def create(self, *args: Any, **arguments: Any) -> Any:  # type: ignore[override]
        body = None if args else self.plain_body(arguments)
        if body is None:
            return await super().create(*args, **arguments)
        call = SdkCall(headers=request_headers(self._openai.asked_model))
        known = self.knows()
        if known and (answer := await self.ask(call, body)) is not None:
            return answer
        with call.under_way():
            answer = await super().create(**arguments)
        if not known:
            self._learn(call, body)
        return answer

    def plain_body(self, arguments: dict[str, Any]) -> bytes | None:
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
            and self._post == self._openai.post
            and "handle_async_request" not in vars(self._transport)
            and self._http.event_hooks == self._hooks.by_event
            and not self._http.cookies
            and not _SDK_LOG.isEnabledFor(logging.DEBUG)
        )

    def knows(self) -> bool:
        """Whether a request of the SDK was seen, and since then nothing has changed that goes into one."""
        known = self._learned
        return (
            known is not None
            and vars(self._openai) == known.client
            and vars(self._http) == known.http
            and self._http.headers.raw == known.http_headers
            and known.send.is_in_place()
        )

    def _learn(self, call: SdkCall, body: bytes) -> None:
        """Learn from a call that the SDK has made."""
        import aiohttp
        import orjson
        from multidict import CIMultiDict
        from yarl import URL

        self._learned = None
        if len(call.answered) != 1 or hides_method(self._openai) or hides_method(self._http):
            return  # it was repeated or redirected, or went through a proxy; or somebody watches
        request = call.answered[0]
        if orjson.loads(request.content) != orjson.loads(body):
            return  # this SDK sends plain requests in a way of its own
        headers = CIMultiDict(request.headers)
        for name in ("content-length", *call.headers):
            headers.popall(name, None)
        if any("idempotency" in name.lower() for name in headers):
            return
        times = request.extensions.get("timeout", {})
        library = sys.modules[type(request).__module__.partition(".")[0]]
        client = {key: dict(value) if type(value) is dict else value for key, value in vars(self._openai).items()}
        timeout = aiohttp.ClientTimeout(
            sock_connect=times.get("connect"), sock_read=times.get("read"), connect=times.get("pool")
        )
        self._learned = Learned(
            url=URL(str(request.url)), headers=headers, timeout=timeout, client=client, http=dict(vars(self._http)),
            http_headers=self._http.headers.raw, send=Original(library.AsyncClient, "send", library),
            library=logging.getLogger(library.__name__),
        )  # fmt: skip

    async def ask(self, call: SdkCall, body: bytes) -> ChatCompletion | None:
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
        told = response.headers
        kind = told.get("content-type", "").partition(";")[0]
        # The HTTP client would have to decompress an answer, and to keep a cookie.
        is_plain = kind.endswith("json") and "content-encoding" not in told and "set-cookie" not in told
        if response.status == 200 and is_plain:
            try:
                answer = _ANSWER.validate_json(content, strict=True)
            except ValidationError:
                pass
            else:
                answer._request_id = told.get("x-request-id")
                known.library.info(
                    'HTTP Request: %s %s "%s %d %s"', "POST", known.url, "HTTP/1.1", 200, response.reason
                )
                return answer
        call.outcome = Outcome(
            status=response.status, reason=response.reason, raw_headers=response.raw_headers, body=content
        )
        return None


def make_chat(client: Any) -> AsyncChat:
    """Make the `chat` of a client; the SDK's own if the light path lacks something that it needs."""
    chat, stock = AsyncChat(client), AsyncCompletions(client)
    is_ours = isinstance(getattr(getattr(client, "_client", None), "_transport", None), HandoverTransport)
    if is_ours and hasattr(stock, "_post") and hasattr(stock, "_client"):  # else the user's own HTTP client, or SDK
        vars(chat)["completions"] = LightCompletions(client)  # where the cached property would keep its own
    return chat


class Original:
    """A function of a class, and whether it still is the one that its library defines."""

    def __init__(self, owner: type, name: str, library: ModuleType) -> None:
        self._owner, self._name = owner, name
        self._folder = str(Path(library.__file__ or "").parent)
        self._last: object = None
        self._is_original = False

    def is_in_place(self) -> bool:
        current = getattr(self._owner, self._name, None)
        if current is not self._last:
            self._last = current
            # `type`, because proxies such as those of wrapt pretend to be functions
            self._is_original = type(current) is FunctionType and current.__code__.co_filename.startswith(self._folder)
        return self._is_original


def hides_method(thing: Any) -> bool:
    """Whether an attribute of an object hides a method of its class, as `client.post = traced` does."""
    return any(callable(getattr(type(thing), name, None)) for name in vars(thing))


def dump(body: dict[str, Any]) -> bytes | None:
    """Return the JSON of a request's body; `None` unless it consists of plain values and messages of answers.

    Values of other types are left to OpenAI's client, which rewrites some (generators, pydantic models, omitted
    arguments), and refuses others (NaN).
    """
    import orjson

    if not _is_plain(body):
        return None
    try:
        return orjson.dumps(body, default=lambda part: part.model_dump(mode="json", exclude_unset=True))
    except orjson.JSONEncodeError:  # an integer above 64 bits, or half of a surrogate pair
        return None


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return True
    if kind is dict:
        for key, item in value.items():  # noqa: SIM110  `all` would take half as long again
            if type(key) is not str or not _is_plain(item):
                return False
        return True
    if kind is list:
        for item in value:  # noqa: SIM110
            if not _is_plain(item):
                return False
        return True
    return math.isfinite(value) if kind is float else kind in _ANSWERED
