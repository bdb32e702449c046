"""HTTP requests that survive a restart of the server: a request without an answer is repeated until a deadline. And
what all HTTP clients share: one for each event loop, and hooks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from art.backoff import Backoff, Failure, asked_pause_s, call_with_retries, retry_after_s
from art.client.terminal import announce_wait
from art.config.base import check_no_userinfo
from art.errors import (
    ArtError,
    AuthenticationError,
    ConfigError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    PermissionDeniedError,
    ProcessError,
    error_from_code,
)

if TYPE_CHECKING:
    import httpx2  # imported by the first client, which not every program needs

logger = logging.getLogger(__name__)

T = TypeVar("T")
W = TypeVar("W", bound=BaseModel)

LOOPBACK = {"127.0.0.1", "::1", "localhost"}
"""Hosts that are this machine."""
EventHooks = Mapping[str, list[Callable[..., Any]]]
"""Hooks of an HTTP client: for `request` before it is sent, for `response` before it is read."""
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
UNREACHABLE_DEADLINE_S = 300.0
"""Time after which a call without any answer from the server fails."""
FIRST_CONTACT_DEADLINE_S = 10.0
"""Time after which a call fails if no connection was ever made: the address is wrong, or no server was started."""
_BACKOFF = Backoff(first_s=0.05, longest_s=2.0)
_QUIET_RETRIES = 5
"""Retries without a warning: about two seconds, for a short interruption."""
_TRY_AGAIN = {408, 502, 503, 504}


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


class LostAnswerError(ConnectionError):
    """There is no answer, or it broke off, because the server is away, restarting or overloaded."""

    retry_after_s = 0.0
    """Pause that the server asks for."""


class HttpClient:
    """Connections to one server. Use it from any event loop, and close it in each."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        unreachable_deadline_s: float = UNREACHABLE_DEADLINE_S,
    ) -> None:
        """
        Args:
            base_url: address of the server, without `/v1`.
            transport: used instead of the network, for servers in this process.
            unreachable_deadline_s: seconds without an answer after which a call fails.

        Raises:
            ConfigError: the address is not valid, or the key is not valid in a header.
        """
        import httpx2

        from art.protocol.keys import check_api_key

        check_no_userinfo(base_url, "base_url")
        url = None
        with contextlib.suppress(httpx2.InvalidURL):
            url = httpx2.URL(base_url)
        if url is None or url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"base_url must be the address of an ART server, like http://host:5000; got {base_url!r}")
        self.is_local = url.host in LOOPBACK
        """Whether the server is on this machine, so that both see the same files."""
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.api_key = check_api_key(api_key) if api_key else None
        self._transport = transport
        self._unreachable_deadline_s = unreachable_deadline_s
        self._was_reached = False
        """Whether a connection to the address was ever made."""
        self._num_closed, self._why_closed = 0, ""
        self._http: PerLoop[httpx2.AsyncClient] = PerLoop(lambda client: client.aclose())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, why: str = "the connection was closed") -> None:
        """Close the connections of this event loop. Running calls fail with the reason `why` and are not repeated."""
        self._num_closed += 1
        self._why_closed = why
        await self._http.close()

    async def typed(self, kind: type[W], method: str, path: str, **options: Any) -> W:
        content = await self.request(method, path, **options)
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            raise ArtError(
                f"{method} {path} gave no {kind.__name__}; are server and client of the same version? {error}"
            ) from error

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        params: Mapping[str, Any] | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
        what: str | None = None,
    ) -> bytes:
        """Send a request and return the body of a successful answer.

        A request without an answer is sent again, because every endpoint is safe to call twice.

        Args:
            what: name of what is waited for, for messages when it takes long.
        """
        content = None if body is None else body.model_dump_json().encode()
        headers, asked = {"Content-Type": "application/json"} if content else None, f"{method} {path}"
        timeout, num_closed = _timeout(read_timeout_s), self._num_closed

        async def ask() -> bytes:
            with self._reporting_loss(asked, num_closed):
                response = await self._http.get(self._open).request(
                    method, path, content=content, params=params, timeout=timeout, headers=headers
                )
            self._was_reached = True
            _raise_for_status(response)
            return response.content

        with announce_wait(what or f"an answer to {method} {self.base_url}{path}"):
            return await self.until_answered(ask, asked)

    @contextlib.asynccontextmanager
    async def stream(self, path: str, *, headers: Mapping[str, str]) -> AsyncIterator[httpx2.Response]:
        """Open a successful answer to read its body piece by piece. It is tried once; the caller decides about a retry.

        Raises:
            ArtError: the server refuses.
            LostAnswerError: there was no answer, or the connection broke while the body was read.
        """
        options: dict[str, Any] = {"headers": headers, "timeout": _timeout(READ_TIMEOUT_S)}
        with self._reporting_loss(f"GET {path}", self._num_closed):
            async with self._http.get(self._open).stream("GET", path, **options) as response:
                if not response.is_success:
                    await response.aread()
                _raise_for_status(response)
                yield response

    @contextlib.contextmanager
    def _reporting_loss(self, asked: str, num_closed: int) -> Iterator[None]:
        """Context manager for an attempt of a request that began when `close` had been called `num_closed` times.

        It raises `LostAnswerError` for a connection that was not made or broke, and `ProcessError` if `close` was
        called since.
        """
        import httpx2

        try:
            yield
        except (httpx2.TransportError, RuntimeError) as lost:
            if self._num_closed != num_closed:
                raise ProcessError(f"{asked} got no answer: {self._why_closed}") from lost
            if isinstance(lost, RuntimeError):
                raise
            raise self._lost(lost, asked) from lost

    async def until_answered(self, ask: Callable[[], Awaitable[T]], asked: str) -> T:
        """Call `ask` until it does not raise `LostAnswerError`; `asked` is its method and path, for messages.

        Raises:
            ProcessError: the server has not answered for too long.
        """
        return await call_with_retries(ask, _BACKOFF, partial(self._before_retry, asked), LostAnswerError)

    def _before_retry(self, asked: str, failure: Failure) -> None:
        error, lost_s, limit_s = failure.error, failure.lasting_s, self._unreachable_deadline_s
        limit_s = limit_s if self._was_reached else min(limit_s, FIRST_CONTACT_DEADLINE_S)
        if lost_s > limit_s and self._was_reached:
            raise ProcessError(
                f"{asked}: the server at {self.base_url} gave no answer for {lost_s:.0f} s (last: {error}). Is it "
                "running? See its log"
            ) from error
        if lost_s > limit_s:
            url = urlsplit(self.base_url)
            port = url.port or {"http": 80, "https": 443}[url.scheme]
            where, host = ("this machine", "") if self.is_local else (url.hostname, "--host 0.0.0.0 ")
            raise ProcessError(
                f"no ART server listens at {self.base_url} (tried for {lost_s:.0f} s: {error}). Start one on {where} "
                f"with `art-server {host}--port {port}`, or correct the address: `base_url`, or the variable "
                "ART_SERVER_URL"
            ) from error
        level = logging.WARNING if failure.number == _QUIET_RETRIES + 1 else logging.DEBUG
        logger.log(level, "%s got no answer (%s): trying again for up to %.0f s", asked, error, limit_s)

    def _lost(self, error: Exception, asked: str) -> LostAnswerError:
        """The error for a connection that was not made or broke, after which the call should be repeated.

        Raises:
            ConfigError: the server's certificate is not accepted, which every repetition would find again.
        """
        import httpx2

        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise ConfigError(
                f"{asked}: the certificate of {self.base_url} is not accepted ({cause.verify_message}). Use an address "
                "that it was issued for, or set the environment variable SSL_CERT_FILE to its authority"
            ) from error
        self._was_reached |= not isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout))
        return LostAnswerError(f"{type(error).__name__}: {error}")

    def _open(self) -> httpx2.AsyncClient:
        import httpx2

        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx2.AsyncClient(
            base_url=self.base_url, headers=headers, transport=self._transport, trust_env=not self.is_local
        )


def _timeout(read_timeout_s: float) -> httpx2.Timeout:
    import httpx2

    return httpx2.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S)


ERRORS_BY_STATUS: dict[int, type[ArtError]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    413: PayloadTooLargeError,
    422: InvalidRequestError,
    429: OverloadedError,
}
"""Errors for answers that do not say themselves which they are, in the way of an ART server."""


def _raise_for_status(response: httpx2.Response) -> None:
    """Raise the error in an answer, as the cause of a `LostAnswerError` if the same request may succeed later."""
    if response.is_success:
        return
    try:
        body = response.json()["error"]
        code, message, param = body["code"], str(body["message"]), body.get("param")
        if not isinstance(code, str):
            raise TypeError
        error = error_from_code(code, message, param=param)
    except (ValueError, KeyError, TypeError, AttributeError):  # not from ART: a proxy, or another server
        kind = ERRORS_BY_STATUS.get(response.status_code, ArtError)
        error = kind(f"{response.request.url} answered {response.status_code}: {response.text[:300]!r}")
    if isinstance(error, OverloadedError):
        asked_s = retry_after_s(response.headers)
        error.retry_after_s = error.retry_after_s if asked_s is None else asked_s
    may_succeed = response.status_code in _TRY_AGAIN or isinstance(error, OverloadedError)
    # The server knows when a retry is useless, e.g. for a model that cannot be loaded.
    if not may_succeed or response.headers.get("x-should-retry") == "false":
        raise error
    lost = LostAnswerError(f"{type(error).__name__}: {error}")
    lost.retry_after_s = asked_pause_s(error)
    raise lost from error
