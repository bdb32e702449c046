"""`art view [DIR]`: open the page about a data directory in a browser, also of one that was copied here.

If a server runs on the directory, its own page is opened, which also shows what is sampled now. Otherwise the page is
served from the files until Ctrl-C, for this machine only. Nothing is written but an index of the rollouts.

    art view                                      the page of .art
    art view runs/monday --export copy            a folder to send: its index.html opens without a server
    art view --url http://gpu-machine:5000        the page of a server elsewhere, with the key in ART_API_KEY
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import socket
import sys
import time
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit

from art.client.client import ServerClient
from art.config import ServerConfig
from art.errors import ArtError, ConfigError, NotFoundError
from art.protocol.keys import check_api_key
from art.storage.layout import DataDir
from art.storage.local_key import LOOPBACK, find_local_key
from art.storage.lock import lock_holder

_REDRAW_S, _TELL_S = 0.2, 30.0
UNREACHABLE_S = 5.0
"""Seconds to reach a server."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data_dir", nargs="?", type=Path, metavar="DIR", help="data directory (default: .art)")
    parser.add_argument("--url", help="of a server elsewhere (default: ART_SERVER_URL, unless DIR is given)")
    parser.add_argument("--port", type=int, help="serve the files on this port (default: a free one)")
    parser.add_argument("--open", action="store_true", help="open the browser too")
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="write a copy of the page that browsers open without a server"
    )


def run(args: argparse.Namespace) -> int:
    url = args.url or (os.environ.get("ART_SERVER_URL") if args.data_dir is None else None)
    if url is not None and args.port is not None:
        raise ConfigError("--port serves the files of a directory; leave it out with the URL of a server")
    if url is not None and args.export is not None:
        raise ConfigError("--export copies a directory; leave it out with the URL of a server")
    if url is not None:
        link = asyncio.run(_link(url, os.environ.get("ART_API_KEY") or find_local_key(url)))
        return _show(f"The page of {url}", link, args.open)
    data_dir = check_data_dir(args.data_dir)
    if args.export is not None:
        return export(data_dir, args.export, args.open)
    if args.port is None and (running := _running_page(data_dir)) is not None:
        return _show(f"A server runs on {data_dir.root}; this is its page", running, args.open)
    return serve_files(data_dir, args.port or 0, args.open)


def check_data_dir(path: Path | None) -> DataDir:
    """Return the data directory at a path, by default `.art`.

    Raises:
        ConfigError: there is no such folder, or it is not a data directory.
    """
    root = (path or Path(".art")).absolute()
    how = "name one, e.g. `art view path/to/.art`; training scripts make `.art` where they run"
    if not root.is_dir():
        what = f"{root} is a file, not a folder" if root.exists() else f"there is no folder {root}"
        raise ConfigError(f"{what}; {how}", param="data_dir")
    if _holds_data(root):
        return DataDir(root)
    below = filter(_holds_data, (*root.glob("*/"), *root.glob("*/*/")))
    inside = max(below, key=lambda one: one.stat().st_mtime, default=None)  # art demo makes a folder for each run
    hint = how if inside is None else f"did you mean {inside}?"
    raise ConfigError(
        f"{root} is not a data directory: it has neither art.db nor a folder PROJECT/models/NAME; {hint}",
        param="data_dir",
    )


def _holds_data(root: Path) -> bool:
    return (
        DataDir(root).is_known or DataDir(root).comparisons.is_dir() or next(root.glob("*/models/*/"), None) is not None
    )


def _running_page(data_dir: DataDir) -> str | None:
    """Return a login link of the server that runs on a directory; `None` if there is none that this user may use."""
    try:
        if lock_holder(data_dir.lock) is None:
            return None
        url = data_dir.address.read_text(encoding="utf-8").strip()
        is_own = not hasattr(os, "getuid") or data_dir.address.stat().st_uid == os.getuid()
    except OSError:  # a copy that may only be read, or a server of an older version
        return None
    if not is_own or urlsplit(url).hostname not in LOOPBACK:  # a key is not sent to wherever a file says
        print(f"a server runs on {data_dir.root}; `art view --url {url}` opens its page. These are the files")
        return None
    key = os.environ.get("ART_API_KEY") or find_local_key(url)
    try:
        return asyncio.run(_link(url, key))
    except ArtError as error:
        print(f"a server runs on {data_dir.root}, but gives no link to its page ({error}); showing the files instead")
        return None


async def _link(url: str, key: str | None) -> str:
    async with ServerClient(url, key, unreachable_deadline_s=UNREACHABLE_S) as client:
        try:
            return await client.page_link()
        except NotFoundError as error:
            why = "it is of an older version of ART, or none is installed there"
            raise NotFoundError(f"the server at {url} has no page: {why}") from error


def _show(what: str, link: str, opens: bool) -> int:
    print(f"{what}:\n{link}\n(opens once, within 15 minutes)", flush=True)
    if opens:
        webbrowser.open(link)
    return 0


def export(data_dir: DataDir, folder: Path, opens: bool) -> int:
    """Write a copy of the page, and say how far it is: on a terminal in one line, else every 30 seconds."""
    from art_page.export import export_page
    from art_page.viewer import Viewer

    is_terminal, told = sys.stderr.isatty(), time.monotonic()

    def progress(done: int, total: int, what: str) -> None:
        nonlocal told
        now = time.monotonic()
        if is_terminal and (now - told > _REDRAW_S or done == total):
            end = "" if done < total else "\n"
            print(f"\r\033[K{done}/{total} files  {what}", end=end, file=sys.stderr, flush=True)
            told = now
        elif not is_terminal and now - told > _TELL_S:
            print(f"{done}/{total} files  {what}", file=sys.stderr, flush=True)
            told = now

    viewer = Viewer(data_dir)
    try:
        num_files = export_page(viewer, folder, progress)
    finally:
        viewer.close()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    index = (folder / "index.html").absolute()
    print(f"{index}\n({num_files} files of answers, {size / 1e6:.1f} MB; send the whole folder)", flush=True)
    if opens:
        webbrowser.open(index.as_uri())
    return 0


def serve_files(data_dir: DataDir, port: int, opens: bool) -> int:
    """Serve the page from files on this machine's loopback until Ctrl-C, without a runtime.

    Raises:
        ConfigError: the port is taken, or the extra `local` is missing.
    """
    import uvicorn

    from art.server.app import App
    from art.server.connections import Connection
    from art_page.page import TrainingPage

    try:
        sock = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ConfigError(f"cannot listen on port {port}: {error.strerror}; choose another --port") from error
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    key = check_api_key(os.environ.get("ART_API_KEY", ""))
    app = App(
        None, api_key=key or secrets.token_urlsafe(24), config=ServerConfig(), data_dir=data_dir.root,
        pages=[TrainingPage],
    )  # fmt: skip
    (page,) = app.pages
    assert isinstance(page, TrainingPage)
    link = page.link(f"http://127.0.0.1:{sock.getsockname()[1]}")
    print(f"{data_dir.root} (files only; no server runs on it):\n{link}\n(opens once; Ctrl-C ends it)", flush=True)
    if opens:
        webbrowser.open(link)
    settings = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False,
        timeout_graceful_shutdown=1, http=Connection,
    )  # fmt: skip
    try:
        asyncio.run(uvicorn.Server(settings).serve(sockets=[sock]))
    except KeyboardInterrupt:
        pass
    finally:
        app.close()
    return 0
