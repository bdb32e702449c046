"""What the page's routes share: the reader of the data directory, sessions, and the checks of browsers."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from art.errors import NotFoundError
from art.server.page.browser import Addresses
from art.server.page.sessions import FailedLogins, Sessions
from art.viewer.viewer import Viewer

T = TypeVar("T")

READERS = 3
"""Threads that read for the page. It has its own, so that a slow view holds up nothing of training and sampling."""


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
