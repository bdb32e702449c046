"""`art-server`: the command that runs a server, which serves models with an OpenAI-compatible API and trains them.

Settings come from the file that the command line may name, then --config-json, then single options; later ones win. The
key is not among them: it is read from ART_API_KEY, because others can see files and command lines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
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
from typing import Any

import art
from art.cli.arguments import Parser, read_settings, read_settings_file
from art.cli.output import run_coroutine, until_unread
from art.client.terminal import EXIT_INTERRUPTED
from art.config import ServerConfig
from art.config.base_models import SHORT_NAMES, resolve_base_model
from art.errors import ArtError, ConfigError
from art.protocol.keys import check_api_key
from art.storage.atomic import write_file
from art.storage.keys import KeyStore
from art.storage.layout import DataDir
from art.storage.local_key import LOOPBACK, left_for_clients
from art.storage.logs import clean, known_secrets, log_to_stderr
from art.worker.waits import end_within

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
            # One line and nothing after it, which is for `_die_with_parent`.
            with open(0, "rb", buffering=0, closefd=False) as file:
                given_key = file.readline().decode().strip()
        if args.die_with_parent:
            _die_with_parent()
        api_key = _operator_key(config, given_key)
        try:
            address = (config.host, config.port)
            given = args.fd is not None
            sock = socket.socket(fileno=args.fd) if given else socket.create_server(address, backlog=LISTEN_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port}: {error.strerror}. Is another server running there? "
                "Choose another one with --port, or --port 0 for a free one"
            ) from error
        _raise_file_limit()
        with contextlib.ExitStack() as stack:
            is_own_key = api_key is None
            if api_key is None:
                api_key = f"art-{secrets.token_urlsafe(24)}"
                print(f"ART_API_KEY={api_key}", flush=True)
            if args.share_key or is_own_key:
                stack.enter_context(left_for_clients(sock.getsockname()[1], api_key))
            log_to_stderr(args.log_level.upper(), secrets=[api_key])
            if args.log_level != "debug":
                logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else every broken request logs a line
            run_coroutine(_serve(config, data_dir, sock, api_key, preload=args.preload))
        return 0
    except BrokenPipeError:
        raise
    except (ArtError, ValueError, OSError) as error:
        print(clean(f"art-server: {error}", known_secrets()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while the server starts; later Ctrl-C is a request to end
        print("\nart-server: stopped before it was ready", file=sys.stderr)
        return EXIT_INTERRUPTED


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


def _operator_key(config: ServerConfig, text: str) -> str | None:
    """The operator's key; `None` on loopback without one, where the server makes its own."""
    key = check_api_key(text)
    if config.host not in LOOPBACK and len(key or "") < MIN_KEY_LENGTH:
        what = f"with a key of {len(key)} characters" if key else "without a key"
        raise ConfigError(
            f"refusing to listen on {config.host} {what}: set ART_API_KEY to at least {MIN_KEY_LENGTH} random "
            "characters, e.g. to the output of `openssl rand -hex 32`"
        )
    return key or None


async def _serve(config: ServerConfig, data_dir: Path, sock: socket.socket, api_key: str, *, preload: bool) -> None:
    import uvicorn

    from art.runtime.runtime import Runtime
    from art.server.app import App
    from art.server.connections import KEEP_ALIVE_S, Connection

    class Server(uvicorn.Server):
        """A server that does not raise the signal again that stopped it: children have to be ended after that."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    runtime = Runtime(data_dir, config)
    faulthandler.enable()
    keys = KeyStore(DataDir(data_dir).keys)  # first: a file that is damaged already is said before anything starts
    app = App(runtime, api_key=api_key, config=config, keys=keys, data_dir=data_dir)
    await runtime.start()
    try:
        if preload:
            await runtime.warm_up()
        settings = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False,
            timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S, timeout_keep_alive=KEEP_ALIVE_S, backlog=LISTEN_BACKLOG,
            http=Connection,
        )  # fmt: skip
        server = Server(settings)

        def stop() -> None:
            server.should_exit = True
            end_within(SHUTDOWN_DEADLINE_S)

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it, so that the server goes on
            loop.add_signal_handler(signal.SIGHUP, stop)
        host, port = sock.getsockname()[:2]
        name = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        url = f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
        address = DataDir(data_dir).address  # `art view` and `art status` read it
        address.parent.mkdir(parents=True, exist_ok=True)
        write_file(address, url.encode())
        print(f"art-server listens on http://{host}:{port} and keeps its data in {data_dir}", flush=True)
        if sys.stdout.isatty():  # nobody else gets a link that needs no key
            for line in filter(None, (page.greeting(url) for page in app.pages)):
                print(line, flush=True)
        await server.serve(sockets=[sock])
    finally:
        app.close()
        keys.close()
        await runtime.close()


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


DATA_DIR = "data_dir"
"""Key of the settings file for the data directory. The other keys are fields of `ServerConfig`."""
_OVERRIDES = ("host", "port", "models", "gpu", "custom_losses", "cluster", "worker_address")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="art-server",
        description="Serve models with an OpenAI-compatible API and train them. The key is read from ART_API_KEY.",
    )
    parser.add_argument("--version", action="version", version=f"art-server {art.__version__}")
    parser.add_argument(
        "--model", action="append", dest="models", metavar="MODEL",
        help="base model to load at the start: a hub id, a folder, or a short name such as "
        f"{next(iter(SHORT_NAMES))}; may be given several times",
    )  # fmt: skip
    parser.add_argument("--cluster", help="where engines and trainers run: workers, ray or ray://HOST:PORT")
    parser.add_argument(
        "--worker-address", metavar="HOST:PORT", help="where workers connect (default: the same host, port 5001)"
    )
    parser.add_argument("--gpu", action="store_const", const=True, help="do not start without a CUDA device")
    parser.add_argument(
        "--custom-losses", action="append", metavar="MODULE",
        help="module or package whose functions clients may use as losses; they run in the trainer's process; may be "
        "given several times",
    )  # fmt: skip
    parser.add_argument("--data-dir", type=Path, help="where everything is kept (default: .art)")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one (default: 5000)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML or JSON, see docs/server.md")
    parser.add_argument("--config-json", help="the same as JSON, see art.config.ServerConfig")
    parser.add_argument("--fd", type=int, help="an inherited listening socket, instead of --host and --port")
    parser.add_argument(
        "--preload", action="store_true",
        help="without GPUs: load the libraries of engine and trainer now, so that a first model is up sooner",
    )  # fmt: skip
    parser.add_argument("--die-with-parent", action="store_true", help="stop when standard input closes")
    parser.add_argument(
        "--key-from-stdin", action="store_true", help="read the key from the first line of standard input"
    )
    parser.add_argument(
        "--share-key", action="store_true", help="let other commands of this user find the key of ART_API_KEY in a file"
    )
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--log-level", default="info", choices=levels, help="least level of the log (default: info)")
    return parser


def read_options(args: argparse.Namespace) -> tuple[ServerConfig, Path]:
    """The settings and the data directory that the arguments name. Raises `ConfigError` for a file that cannot be read,
    a setting that does not exist or has a wrong value, and an unknown base model."""
    values: dict[str, Any] = {} if args.config is None else read_settings_file(args.config)
    source = "the command line" if args.config is None else str(args.config)
    data_dir = values.pop(DATA_DIR, None)
    if not isinstance(data_dir, str | None):
        raise ConfigError(f"{source}: `{DATA_DIR}` must be a path, got {data_dir!r}")
    if args.config_json:
        values |= read_settings(ServerConfig, args.config_json, "--config-json").model_dump(exclude_unset=True)
    values |= {name: value for name in _OVERRIDES if (value := getattr(args, name)) is not None}
    config = read_settings(ServerConfig, values, source)
    for name in config.models:
        resolve_base_model(name)
    return config, Path(args.data_dir or data_dir or ".art").expanduser().resolve()


if __name__ == "__main__":
    sys.exit(main())
