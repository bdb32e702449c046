"""`art-server`: the ART server as a program."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Generator
from pathlib import Path

from art.cli.event_loop import run_coroutine
from art.cli.server_options import build_parser, read_options
from art.cli.server_watch import ServerWatch, end_within
from art.config import ServerConfig
from art.errors import ArtError, ConfigError
from art.storage.keys import KeyStore
from art.storage.layout import DataDir

logger = logging.getLogger("art.server")

_PR_SET_PDEATHSIG = 1
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
MIN_KEY_LENGTH = 16
LISTEN_BACKLOG = 4096
GRACEFUL_SHUTDOWN_S = 4
"""Given to requests that run when the server is asked to stop; its children get `EXIT_TIMEOUT_S` after that."""
SHUTDOWN_DEADLINE_S = 9.0
"""From a signal to the end, whatever the server is doing."""


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        config, data_dir = read_options(args)
        if args.die_with_parent:
            _die_with_parent()
        api_key = _api_key(config, announce=args.fd is None)
        sock = _open_socket(config, args.fd)
        run_coroutine(_serve(config, data_dir, sock, api_key))
        return 0
    except (ArtError, ValueError, OSError) as error:
        print(f"art-server: {error}", file=sys.stderr)
        return 1


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


def _api_key(config: ServerConfig, *, announce: bool) -> str:
    if key := os.environ.pop("ART_API_KEY", None):  # engines and trainers have no use for it
        if config.host not in _LOOPBACK and len(key) < MIN_KEY_LENGTH:
            raise ConfigError(
                f"refusing to listen on {config.host} with a key of {len(key)} characters: set ART_API_KEY to at least "
                f"{MIN_KEY_LENGTH} random ones, e.g. of `openssl rand -hex 32`"
            )
        return key
    if config.host not in _LOOPBACK:
        raise ConfigError(
            f"refusing to listen on {config.host} without a key: set ART_API_KEY, e.g. to the output of "
            "`openssl rand -hex 32`"
        )
    key = f"art-{secrets.token_urlsafe(24)}"
    if announce:
        print(f"ART_API_KEY={key}", flush=True)
    return key


async def _serve(config: ServerConfig, data_dir: Path, sock: socket.socket, api_key: str) -> None:
    import uvicorn

    from art.runtime.runtime import Runtime
    from art.server.app import create_app
    from art.server.connections import KEEP_ALIVE_S, connections

    class Server(uvicorn.Server):
        """uvicorn raises the signal that stopped it once more when it is done; ours has children to end after that."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    runtime = Runtime(data_dir, config)
    watch = ServerWatch(DataDir(data_dir), runtime.report)
    watch.install()
    watching = asyncio.create_task(watch.run(), name="server-watch")
    await runtime.start()
    keys = KeyStore(DataDir(data_dir).keys)
    try:
        app = create_app(runtime, api_key=api_key, config=config, keys=keys)
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
            backlog=LISTEN_BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            http=connections(config.limits),
            ws="none",
            server_header=False,
        )
        server = Server(settings)

        def stop() -> None:
            server.should_exit = True
            end_within(SHUTDOWN_DEADLINE_S)

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        host, port = sock.getsockname()[:2]
        print(f"art-server listens on http://{host}:{port} and keeps its data in {data_dir}", flush=True)
        await server.serve(sockets=[sock])
    finally:
        watching.cancel()
        keys.close()
        await runtime.close()


def _die_with_parent() -> None:
    """Stop when the parent is gone: standard input is a pipe that only the parent holds open. On Linux a signal comes
    too, in case somebody else inherited the pipe. Nobody is left to end a server that hangs on the way out, so it does
    that itself."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        end_within(SHUTDOWN_DEADLINE_S)  # the signal alone does nothing to an event loop that stands still
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
