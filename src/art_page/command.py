"""`art view [DIR ...]`: print an address of the page about data directories, also of some that were copied here.

If a server runs on the directory, it is that server's page, which also shows what is sampled now. Otherwise the page is
served from the files until Ctrl-C, for this machine only. Nothing is written but an index of the rollouts, and the
labels that you give a run. The address opens once; --open opens the browser too.

    art view                                    the page of .art
    art view demo                               all data directories in a folder
    art view demo --export copy                 a copy that needs no server
    art view .art --read runs                   what the page shows, as JSON
    art view .art --read 'runs/games/agent/rollouts?step=12' --json 12.json
    art view --url http://gpu-machine:5000      the page of a server elsewhere
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from art.client.client import ServerClient
from art.config import ServerConfig
from art.errors import ArtError, ConfigError, NotFoundError
from art.protocol.keys import check_api_key
from art.storage.layout import DataDir
from art.storage.local_key import LOOPBACK, find_local_key
from art.storage.lock import lock_holder

if TYPE_CHECKING:
    from art_page.page import AnyViewer

_REDRAW_S, _TELL_S = 0.2, 30.0
UNREACHABLE_S = 5.0
"""Seconds to reach a server."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_place_options(parser)
    parser.add_argument("--port", type=int, help="serve the files on this port (default: a free one)")
    parser.add_argument("--open", action="store_true", help="open the browser too")
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="write a copy of the page that browsers open without a server"
    )
    parser.add_argument("--read", metavar="PATH", help="print one answer of the page as JSON, and end; e.g. runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write that answer to a file (PATH's default: runs)")


def add_place_options(parser: argparse.ArgumentParser) -> None:
    dirs = "data directories, or folders of them, shown together (default: .art)"
    parser.add_argument("data_dirs", nargs="*", type=Path, metavar="DIR", help=dirs)
    parser.add_argument(
        "--url",
        help="address of a server elsewhere; its key is in ART_API_KEY (default: ART_SERVER_URL, unless DIR is given)",
    )


def chosen_url(args: argparse.Namespace) -> str | None:
    """Return the address of the server that the options name; `None` for the files of directories."""
    return args.url or (None if args.data_dirs else os.environ.get("ART_SERVER_URL"))


def run(args: argparse.Namespace) -> int:
    url = chosen_url(args)
    if url is not None and args.port is not None:
        raise ConfigError("--port serves the files of a directory; leave it out with the URL of a server")
    if args.export is not None and (url is not None or args.port is not None or args.read or args.json):
        raise ConfigError("--export copies a directory; leave out --url, --port, --read and --json")
    if args.read or args.json:
        with contextlib.closing(PageReader(args.data_dirs, url)) as reader:
            answer = reader.read(args.read or "runs") + "\n"
        if args.json:
            args.json.write_text(answer, encoding="utf-8")
        else:
            print(answer, end="")
        return 0
    if url is not None:
        link = asyncio.run(_link(url, os.environ.get("ART_API_KEY") or find_local_key(url)))
        return _show(f"The page of {url}", link, args.open)
    data_dirs = find_data_dirs(args.data_dirs)
    if args.export is not None:
        return export(data_dirs, args.export, args.open)
    if len(data_dirs) == 1 and args.port is None and (running := _running_page(data_dirs[0])) is not None:
        return _show(f"A server runs on {data_dirs[0].root}; this is its page", running, args.open)
    return serve_files(data_dirs, args.port or 0, args.open)


class PageReader:
    """Reads what the page shows, as JSON, from data directories or from a server. Nothing is written but the index."""

    def __init__(self, paths: Sequence[Path], url: str | None) -> None:
        self._paths, self._url = paths, url

    def read(self, path: str) -> str:
        """Return the answer of a path with its query, e.g. `runs/games/agent/rollouts?step=12`, as `/view/api/` has it.

        Raises:
            NotFoundError: there is no such path, run, step or rollout.
            InvalidRequestError: a parameter is wrong.
            ConfigError: there is no such data directory.
        """
        if self._url is not None:
            return asyncio.run(self._ask(self._url, path))
        from art_page.page import find_path

        row, asked = find_path(path)
        self._viewer.complete()
        return row.read(self._viewer, asked).model_dump_json()

    @functools.cached_property
    def _viewer(self) -> AnyViewer:
        return open_viewer(find_data_dirs(self._paths))

    async def _ask(self, url: str, path: str) -> str:
        key = os.environ.get("ART_API_KEY") or find_local_key(url)
        async with ServerClient(url, key, unreachable_deadline_s=UNREACHABLE_S) as client:
            return (await client.request("GET", f"/view/api/{path.lstrip('/')}")).decode()

    def close(self) -> None:
        if "_viewer" in self.__dict__:
            self._viewer.close()


def open_viewer(data_dirs: Sequence[DataDir]) -> AnyViewer:
    from art_page.several import Viewers
    from art_page.viewer import Viewer

    return Viewer(data_dirs[0]) if len(data_dirs) == 1 else Viewers(data_dirs)


def find_data_dirs(paths: Sequence[Path]) -> list[DataDir]:
    """Return the data directories at paths, or up to two folders below them; without paths that at `.art`.

    Raises:
        ConfigError: a path is no folder, or has no data directory.
    """
    found: dict[Path, DataDir] = {}
    for root in (path.absolute() for path in paths or [Path(".art")]):
        how = "name one, e.g. `art view path/to/.art`; training scripts make `.art` where they run"
        if not root.is_dir():
            what = f"{root} is a file, not a folder" if root.exists() else f"there is no folder {root}"
            raise ConfigError(f"{what}; {how}", param="data_dirs")
        # art demo makes a folder for each run
        inside = [root] if _holds_data(root) else sorted(filter(_holds_data, (*root.glob("*/"), *root.glob("*/*/"))))
        if not inside:
            raise ConfigError(
                f"{root} is not a data directory, and holds none: it has neither art.db nor a folder "
                f"PROJECT/models/NAME; {how}",
                param="data_dirs",
            )
        found |= {one.resolve(): DataDir(one) for one in inside}
    return list(found.values())


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


def export(data_dirs: Sequence[DataDir], folder: Path, opens: bool) -> int:
    """Write a copy of the page, and say how far it is: on a terminal in one line, else every 30 seconds."""
    from art_page.export import export_page
    from art_page.viewer import Viewer

    if len(data_dirs) > 1:
        named = ", ".join(str(one.root) for one in data_dirs[:3])
        raise ConfigError(f"--export copies one data directory, and here are {len(data_dirs)}: {named}; name one")
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

    viewer = Viewer(data_dirs[0])
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


def serve_files(data_dirs: Sequence[DataDir], port: int, opens: bool) -> int:
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
        None, api_key=key or secrets.token_urlsafe(24), config=ServerConfig(), data_dir=data_dirs[0].root,
        pages=[TrainingPage],
    )  # fmt: skip
    (page,) = app.pages
    assert isinstance(page, TrainingPage)
    page.viewer = open_viewer(data_dirs)
    link = page.link(f"http://127.0.0.1:{sock.getsockname()[1]}")
    what = "\n".join(str(data_dir.root) for data_dir in data_dirs)
    print(f"{what} (files only):\n{link}\n(opens once; Ctrl-C ends it)", flush=True)
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
