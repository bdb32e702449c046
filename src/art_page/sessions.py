"""Who sees the page. Sessions: a key or a one-time code opens one, and a random id in a cookie names it.

key  --login-->  session id (cookie, HttpOnly)        the key itself is in no cookie and in no table
key  --link--->  one-time code in an address  --login-->  session id

Ids and codes are kept as SHA-256 only. A session ends with its key, when it was not used for `IDLE_S`, and with the
server. What is checked of a browser's request:

GET   with a cookie    Host is an address of the server; the request does not come from another origin
POST  with a cookie    also: Origin is the page's own, and the header `x-art-page` is there

A name that an attacker points at this machine (DNS rebinding) is no address of the server. An IP address in `Host`
cannot be such a name.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request

from art.errors import AuthenticationError, OverloadedError, PermissionDeniedError

PAGE_HEADER = "x-art-page"
"""Header of the page's own requests that change something. A form of another page cannot send it."""
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


class Addresses:
    """The addresses at which browsers reach a server."""

    def __init__(self, host: str = "127.0.0.1", public_urls: Iterable[str] = ()) -> None:
        """
        Args:
            host: the address that the server listens on.
            public_urls: further addresses, of a proxy before the server.
        """
        self._names = {"localhost"} | ({host.lower()} - _WILDCARDS)
        self._public = {url.lower().rstrip("/") for url in public_urls}
        self._public_hosts = {urlsplit(url).netloc for url in self._public}

    def check_host(self, request: Request) -> None:
        """Check that the request names an address of this server.

        Raises:
            PermissionDeniedError: its `Host` is another name.
        """
        hosts = request.headers.getlist("host")
        host = hosts[0].lower() if len(hosts) == 1 else ""
        with contextlib.suppress(ValueError):  # of a host that is none, or that is another name than ours
            name = "" if "@" in host else urlsplit(f"//{host}").hostname or ""
            if host not in self._public_hosts and name not in self._names:
                ipaddress.ip_address(name)
            return
        raise PermissionDeniedError(
            f"this server does not know the address {host[:200]!r}, so it does not show its page there. If it is "
            "right, its operator can add it to `cors_origins` in the server's settings, e.g. "
            '`cors_origins = ["https://art.lab.example"]`; `localhost` and IP addresses need no setting'
        )

    def check_page_request(self, request: Request) -> None:
        """Check that a request with a cookie comes from the page, and not from another one in the same browser.

        Raises:
            PermissionDeniedError: it comes from elsewhere, or it would change something and does not say that it comes
                from the page.
        """
        self.check_host(request)
        site = request.headers.get("sec-fetch-site")
        if site not in (None, "same-origin", "none"):
            raise PermissionDeniedError("this request comes from another page; send a key instead of the cookie")
        if request.method in ("GET", "HEAD"):
            return
        if PAGE_HEADER not in request.headers:
            raise PermissionDeniedError(
                f"a request that changes something needs the header `{PAGE_HEADER}` beside the cookie; "
                "programs send a key instead"
            )
        origin = request.headers.get("origin", "").lower()
        host = request.headers.get("host", "").lower()
        own = {url for url in self._public if urlsplit(url).netloc == host} or {f"{request.scope['scheme']}://{host}"}
        if origin not in own:
            raise PermissionDeniedError(
                f"this request has the origin {origin[:200]!r}, and the page is at {sorted(own)[0]!r}. Behind a proxy "
                "with TLS, add the address that the browser shows to `cors_origins` in the server's settings"
            )

    def is_https(self, request: Request) -> bool:
        """Whether the browser reaches the server by https, directly or through a proxy."""
        host = request.headers.get("host", "").lower()
        return request.scope["scheme"] == "https" or f"https://{host}" in self._public


def cookie_name(request: Request, *, https: bool) -> str:
    """Name of the session's cookie. It has the port, since a browser sends cookies to all ports of a host.

    With https the prefix `__Host-` makes browsers refuse the cookie from another host of the same domain.
    """
    port = request.headers.get("host", "").rpartition(":")[2]
    name = f"art_session_{port}" if port.isdigit() else "art_session"
    return f"__Host-{name}" if https else name


def read_cookies(request: Request, *, https: bool) -> list[str]:
    """Return what may be the id of the request's session: the value of each cookie of that name.

    A page on another port of this host can set one too, even one that the browser sends first.
    """
    name, texts = cookie_name(request, https=https), []
    for value in request.headers.getlist("cookie"):  # split by hand: other programs may have set any form of cookies
        for part in value.split(";"):
            own, _, text = part.strip().partition("=")
            if own == name and text:
                texts.append(text)
    return texts


def make_cookie(request: Request, text: str, *, https: bool) -> str:
    """Make the header `Set-Cookie` for a session. An empty `text` removes the cookie."""
    parts = [f"{cookie_name(request, https=https)}={text}", "Path=/", "HttpOnly", "SameSite=Strict"]
    parts += ["Secure"] if https else []
    return "; ".join([*parts, *([] if text else ["Max-Age=0"])])


IDLE_S = 24 * 3600.0
"""A session ends when it was not used for this long."""
LONGEST_S = 14 * 24 * 3600.0
"""A session ends after this time however much it was used."""
CODE_S = 15 * 60.0
"""Seconds for which a login link can be used."""
MAX_SESSIONS, MAX_PER_KEY, MAX_CODES = 1024, 64, 256
"""When a table is full, its oldest entry goes."""
TRIES, TRY_EVERY_S = 10, 6.0
"""Failed logins that one address may have at once, and the time after which it may have another."""
MAX_ADDRESSES = 4096
"""Addresses of clients whose failed logins are remembered."""


@dataclass(slots=True)
class Session:
    """One login."""

    key_id: str
    started_at: float
    used_at: float

    @property
    def ends_at(self) -> float:
        return min(self.used_at + IDLE_S, self.started_at + LONGEST_S)


class Sessions:
    """The sessions and one-time codes of one server. Use it in one thread."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._codes: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def open(self, key_id: str) -> tuple[str, Session]:
        """Open a session for a key. Returns its id, which is not kept anywhere, and the session."""
        now, text = self._now(), secrets.token_urlsafe(32)
        own = [digest for digest, session in self._sessions.items() if session.key_id == key_id]
        for digest in own[: max(0, len(own) - MAX_PER_KEY + 1)]:
            del self._sessions[digest]
        if len(self._sessions) >= MAX_SESSIONS:
            self._sessions.popitem(last=False)
        session = self._sessions[_digest(text)] = Session(key_id, now, now)
        return text, session

    def find(self, *texts: str) -> Session:
        """Return the session that has one of these ids, and note that it was used.

        Raises:
            AuthenticationError: there is none, or it has ended.
        """
        now = self._now()
        for digest in map(_digest, texts):
            session = self._sessions.get(digest)
            if session is not None and session.ends_at > now:
                session.used_at = now
                self._sessions.move_to_end(digest)
                return session
            self._sessions.pop(digest, None)
        raise AuthenticationError("the session of the page has ended; log in again")

    def close(self, text: str) -> None:
        """End a session. An id without a session is ignored."""
        self._sessions.pop(_digest(text), None)

    def make_code(self, key_id: str) -> tuple[str, float]:
        """Make a one-time code that opens a session for a key. Returns it with the time at which it expires."""
        text, until = secrets.token_urlsafe(24), self._now() + CODE_S
        while len(self._codes) >= MAX_CODES:
            self._codes.popitem(last=False)
        self._codes[_digest(text)] = (key_id, until)
        return text, until

    def redeem(self, code: str) -> str:
        """Return the id of the key that a one-time code was made for. The code is used up.

        Raises:
            AuthenticationError: there is no such code, or it was used, or it has expired.
        """
        key_id, until = self._codes.pop(_digest(code), ("", 0.0))
        if until <= self._now():
            raise AuthenticationError(
                "this login link was used, or is too old; `art view` with the data directory of the server prints "
                "another one, and a key opens the page too"
            )
        return key_id


class FailedLogins:
    """Limits the failed logins of each address. A look-up takes the same time however many addresses there are."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._addresses: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Failed logins that are still counted, and when they were last counted."""

    def check(self, address: str) -> None:
        """
        Raises:
            OverloadedError: the address has had too many failed logins.
        """
        count = self._count(address)
        if count > TRIES - 1:
            error = OverloadedError(f"{TRIES} logins with wrong keys came from {address}; try again later")
            error.retry_after_s = (count - TRIES + 1) * TRY_EVERY_S
            raise error

    def note(self, address: str) -> None:
        """Count one failed login of an address."""
        self._addresses[address] = (self._count(address) + 1, self._now())
        self._addresses.move_to_end(address)
        if len(self._addresses) > MAX_ADDRESSES:
            self._addresses.popitem(last=False)

    def _count(self, address: str) -> float:
        count, at = self._addresses.get(address, (0.0, 0.0))
        return max(0.0, count - (self._now() - at) / TRY_EVERY_S)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
