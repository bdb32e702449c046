"""Serves the page about a data directory from its files, without a runtime."""

from __future__ import annotations

import asyncio
import logging
import socket
import webbrowser
from typing import TYPE_CHECKING, cast

import uvicorn

from art.config import ServerConfig
from art.errors import ConfigError
from art.protocol.keys import LOGIN_MARK
from art.server.app import App
from art.server.auth import SERVER_KEY_ID
from art.server.connections import connections
from art.server.page.browser import Addresses
from art.server.page.sessions import PageState
from art.storage.layout import DataDir
from art.viewer.viewer import Viewer

if TYPE_CHECKING:
    from art.runtime.runtime import Runtime


def make_app(data_dir: DataDir, api_key: str, host: str) -> tuple[App, PageState]:
    """Make the application that shows the files of a data directory, and the state of its page."""
    page = PageState(Viewer(data_dir), Addresses(host), has_server=False)
    nothing = cast("Runtime", None)  # no route of the page asks the runtime
    return App(nothing, api_key=api_key, data_dir=data_dir.root, page=page), page


def serve(data_dir: DataDir, host: str, port: int, api_key: str, opens: bool) -> int:
    """Serve until Ctrl-C, and print the address.

    Raises:
        ConfigError: the port is taken.
    """
    try:
        sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    address = f"http://[{name}]" if ":" in name else f"http://{name}"
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    app, page = make_app(data_dir, api_key, name)
    code, _ = page.sessions.make_code(SERVER_KEY_ID)
    link = f"{address}:{sock.getsockname()[1]}/{LOGIN_MARK}{code}"
    print(f"{data_dir.root} (files only; no server runs on it):\n{link}\n(opens once; Ctrl-C ends it)", flush=True)
    if opens:
        webbrowser.open(link)
    settings = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False,
        timeout_graceful_shutdown=1, http=connections(ServerConfig().limits),
    )  # fmt: skip
    try:
        asyncio.run(uvicorn.Server(settings).serve(sockets=[sock]))
    except KeyboardInterrupt:
        pass
    finally:
        page.close()
    return 0
