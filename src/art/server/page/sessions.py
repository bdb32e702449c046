"""Who sees the page. Sessions: a key or a one-time code opens one, and a random id in a cookie names it.

key  --login-->  session id (cookie, HttpOnly)        the key itself is in no cookie and in no table
key  --link--->  one-time code in an address  --login-->  session id

Ids and codes are kept as SHA-256 only. A session ends with its key, when it was not used for `IDLE_S`, and with the
server. `PageState` is what the page's routes share: the reader of the data directory, sessions, and checks of browsers.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from art.errors import AuthenticationError, NotFoundError, OverloadedError
from art.server.page.browser import Addresses
from art.viewer.viewer import Viewer

T = TypeVar("T")

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
READERS = 3
"""Threads that read for the page. It has its own, so that a slow view holds up nothing of training and sampling."""


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


class PageState:
    """State of the page on one server."""

    def __init__(self, viewer: Viewer | None, addresses: Addresses, *, has_server: bool = True) -> None:
        """
        Args:
            viewer: reads the data directory; `None` if there is nothing to show.
            has_server: false for `art view`, which has files only.
        """
        self._viewer = viewer
        self.addresses = addresses
        self.has_server = has_server
        self.sessions = Sessions()
        self.failed_logins = FailedLogins()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="page")

    async def read(self, ask: Callable[[Viewer], T]) -> T:
        """Ask the viewer, in a thread of the page.

        Raises:
            NotFoundError: the server was started without a data directory.
        """
        viewer = self._viewer
        if viewer is None:
            raise NotFoundError("this server has no data directory to show")
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._readers, lambda: context.run(ask, viewer))

    def close(self) -> None:
        """End the threads, and close the viewer."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self._viewer is not None:
            self._viewer.close()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
