"""`art-server`: the command that runs a server, which serves models with an OpenAI-compatible API and trains them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from art.cli.output import run_coroutine, until_unread
from art.cli.server_options import build_parser, read_options
from art.client.interrupt import EXIT_INTERRUPTED
from art.config import ServerConfig
from art.errors import ArtError, ConfigError
from art.protocol.keys import LOGIN_MARK, check_api_key
from art.runtime.supervision.report import ServerWatch, end_within
from art.server.auth import SERVER_KEY_ID
from art.storage.atomic import write_file
from art.storage.keys import KeyStore
from art.storage.layout import DataDir
from art.storage.local_key import LOOPBACK, left_for_clients
from art.storage.log_lines import clean, known_secrets, log_to_stderr

if TYPE_CHECKING:
    from art.server.page.sessions import PageState

logger = logging.getLogger("art.server")

_PR_SET_PDEATHSIG = 1
MIN_KEY_LENGTH = 16
MAX_OPEN_FILES = 65_536
MAC_OPEN_FILES = 10_240
"""What macOS allows a process at most by default, even where its limit says that there is none."""
LISTEN_BACKLOG = 4096
COLLECT_AFTER = 20_000
"""New objects after which the garbage collector looks for cycles. Python's default, 700 in 3.11, delays the start."""
GRACEFUL_SHUTDOWN_S = 4
"""Seconds for running requests to end when the server is asked to stop. Engines and trainers are ended after that."""
SHUTDOWN_DEADLINE_S = 9.0
"""Seconds from a signal to the end of the process, even if the server hangs."""


def main(argv: list[str] | None = None) -> int:
    return until_unread(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    args = build_parser().parse_args(argv)
    gc.set_threshold(COLLECT_AFTER)
    try:
        config, data_dir = read_options(args)
        given_key = os.environ.pop("ART_API_KEY", "")  # engines and trainers do not need it
        if args.key_from_stdin:
            given_key = _first_line(0)
        if args.die_with_parent:
            _die_with_parent()
        api_key = _operator_key(config, given_key)
        sock = _open_socket(config, args.fd)
        _raise_file_limit()
        with contextlib.ExitStack() as stack:
            is_own_key = api_key is None
            if api_key is None:
                api_key = f"art-{secrets.token_urlsafe(24)}"
                print(f"ART_API_KEY={api_key}", flush=True)
            if args.share_key or is_own_key:
                stack.enter_context(left_for_clients(sock.getsockname()[1], api_key))
            _log(args.log_level, api_key)
            run_coroutine(_serve(config, data_dir, sock, api_key))
        return 0
    except BrokenPipeError:
        raise
    except (ArtError, ValueError, OSError) as error:
        print(clean(f"art-server: {error}", known_secrets()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while the server starts; later Ctrl-C is a request to end
        print("\nart-server: stopped before it was ready", file=sys.stderr)
        return EXIT_INTERRUPTED


def _log(level: str, api_key: str) -> None:
    log_to_stderr(level.upper(), secrets=[api_key])
    if level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else every broken request logs a line


def _raise_file_limit() -> None:
    """Allow more open files, since each connection is one and many systems allow 1,024 by default."""
    if sys.platform == "win32":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for number in (MAX_OPEN_FILES, MAC_OPEN_FILES):
        limit = number if most == resource.RLIM_INFINITY else min(number, most)
        with contextlib.suppress(ValueError, OSError):  # then the old limit remains
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
            return


def _open_socket(config: ServerConfig, fd: int | None) -> socket.socket:
    if fd is not None:
        return socket.socket(fileno=fd)
    try:
        return socket.create_server((config.host, config.port), backlog=LISTEN_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}. Is another server running there? "
            "Choose another one with --port, or --port 0 for a free one"
        ) from error


def _first_line(descriptor: int) -> str:
    """Read one line and nothing after it, which is for `_die_with_parent`."""
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        return file.readline().decode().strip()


def _operator_key(config: ServerConfig, text: str) -> str | None:
    """The operator's key; `None` on loopback without one, where the server makes its own."""
    if key := check_api_key(text):
        if config.host not in LOOPBACK and len(key) < MIN_KEY_LENGTH:
            raise ConfigError(
                f"refusing to listen on {config.host} with a key of {len(key)} characters: set ART_API_KEY to at least "
                f"{MIN_KEY_LENGTH} random ones, e.g. of `openssl rand -hex 32`"
            )
        return key
    if config.host not in LOOPBACK:
        raise ConfigError(
            f"refusing to listen on {config.host} without a key: set ART_API_KEY, e.g. to the output of "
            "`openssl rand -hex 32`"
        )
    return None


async def _serve(config: ServerConfig, data_dir: Path, sock: socket.socket, api_key: str) -> None:
    import uvicorn

    from art.runtime.runtime import Runtime
    from art.server.app import App
    from art.server.connections import KEEP_ALIVE_S, connections
    from art.server.page.browser import Addresses
    from art.server.page.sessions import PageState
    from art.viewer.viewer import Viewer

    class Server(uvicorn.Server):
        """A server that does not raise the signal again that stopped it: children have to be ended after that."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    runtime = Runtime(data_dir, config)
    watch = ServerWatch(DataDir(data_dir), runtime.report)
    watch.install()
    watching = asyncio.create_task(watch.run(), name="server-watch")
    keys = KeyStore(DataDir(data_dir).keys)  # first: a file that is damaged already is said before anything starts
    await runtime.start()
    page = PageState(Viewer(DataDir(data_dir), live=runtime.overview), Addresses(config.host, config.public_urls))
    try:
        app = App(runtime, api_key=api_key, config=config, keys=keys, data_dir=data_dir, page=page)
        settings = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False,
            timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S, timeout_keep_alive=KEEP_ALIVE_S, backlog=LISTEN_BACKLOG,
            http=connections(config.limits),
        )  # fmt: skip
        server = Server(settings)

        def stop() -> None:
            server.should_exit = True
            end_within(SHUTDOWN_DEADLINE_S)

        def drain() -> None:
            """Announce the end of the server, then end it: at once, after `drain_s`, or with the second signal."""
            if app.state.is_draining or not config.drain_s:
                stop()
            else:
                logger.info("ending in %g s: /ready says no, and requests are answered until then", config.drain_s)
                loop.call_later(config.drain_s, stop)
            app.state.is_draining = True

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, drain)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it, so that the server goes on
            loop.add_signal_handler(signal.SIGHUP, drain)
        host, port = sock.getsockname()[:2]
        print(f"art-server listens on http://{host}:{port} and keeps its data in {data_dir}", flush=True)
        _show_page(page, DataDir(data_dir), host, port)
        await server.serve(sockets=[sock])
    finally:
        watching.cancel()
        page.close()
        keys.close()
        await runtime.close()


def _show_page(page: PageState, data_dir: DataDir, host: str, port: int) -> None:
    """Leave the address for `art view`, and print that of the page. Only a terminal gets a link that needs no key."""
    name = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
    data_dir.address.parent.mkdir(parents=True, exist_ok=True)
    write_file(data_dir.address, url.encode())
    if sys.stdout.isatty():
        code, _ = page.sessions.make_code(SERVER_KEY_ID)
        print(f"see it learn: {url}/{LOGIN_MARK}{code}  (opens once; later: art view {data_dir.root})", flush=True)


def _die_with_parent() -> None:
    """Stop when the parent is gone: standard input is a pipe that only the parent holds open.

    On Linux the kernel also sends a signal, in case another process inherited the pipe. Nobody is left to kill a server
    that hangs on its way out, so it has a deadline of its own.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        end_within(SHUTDOWN_DEADLINE_S)  # a blocked event loop does not react to the signal
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
