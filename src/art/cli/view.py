"""`art view [DIR]`: open the page about a data directory in a browser, also of one that was copied here.

If a server runs on the directory, its own page is opened, which also shows what is sampled now. Otherwise the page is
served from the files until Ctrl-C, for this machine only. Nothing is written but an index of the rollouts.

    art view                                      the page of .art
    art view runs/monday --json                   paths of answers, for programs
    art view runs/monday --json runs              one answer, as JSON
    art view --url http://gpu-machine:5000        the page of a server elsewhere, with the key in ART_API_KEY
    art view runs/monday --export monday-page     a folder that opens without any program, to be sent to somebody
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit

from art.client import ArtClient
from art.errors import ArtError, ConfigError, NotFoundError
from art.protocol.keys import check_api_key
from art.storage.layout import DataDir
from art.storage.local_key import LOOPBACK, find_local_key
from art.storage.lock import lock_holder

UNREACHABLE_S = 5.0
"""Seconds to reach a server."""
MIN_KEY_LENGTH = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data_dir", nargs="?", type=Path, metavar="DIR", help="data directory (default: .art)")
    parser.add_argument("--url", help="of a server elsewhere (default: ART_SERVER_URL, unless DIR is given)")
    parser.add_argument("--port", type=int, help="serve the files on this port (default: a free one)")
    parser.add_argument("--host", help="serve the files on this address; others than loopback need ART_API_KEY")
    parser.add_argument("--open", action="store_true", help="open the browser too")
    parser.add_argument(
        "--json", nargs="*", metavar="PATH", help="print the answers of these paths as JSON; without PATH, the paths"
    )
    add_export_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.export is not None:
        from art.cli.view_files import export

        return export(args, check_data_dir(args.data_dir))
    if args.json is not None and not args.json:
        from art.cli.view_files import print_paths

        print_paths()
        return 0
    url = args.url or (os.environ.get("ART_SERVER_URL") if args.data_dir is None else None)
    if url is not None and (args.host or args.port is not None):
        raise ConfigError("--host and --port serve the files of a directory; leave them out with the URL of a server")
    if args.json is not None:
        from art.cli.view_files import print_answers

        return print_answers(args.json, None if url else check_data_dir(args.data_dir), url)
    if url is not None:
        link = asyncio.run(_link(url, os.environ.get("ART_API_KEY") or find_local_key(url)))
        return _show(f"The page of {url}", link, args.open)
    data_dir = check_data_dir(args.data_dir)
    if args.host is None and args.port is None and (running := _running_page(data_dir)) is not None:
        return _show(f"A server runs on {data_dir.root}; this is its page", running, args.open)
    return serve_files(data_dir, args.host or "127.0.0.1", args.port or 0, args.open)


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
    async with ArtClient(url, key, unreachable_deadline_s=UNREACHABLE_S) as client:
        try:
            return await client.page_link()
        except NotFoundError as error:
            raise NotFoundError(f"the server at {url} has no page; it is of an older version of ART") from error


def _show(what: str, link: str, opens: bool) -> int:
    print(f"{what}:\n{link}\n(opens once, within 15 minutes)", flush=True)
    if opens:
        webbrowser.open(link)
    return 0


def serve_files(data_dir: DataDir, host: str, port: int, opens: bool) -> int:
    """Serve the page from files until Ctrl-C.

    Raises:
        ConfigError: the port is taken, the extra `local` is missing, or others could reach it without a key.
    """
    key = check_api_key(os.environ.get("ART_API_KEY", ""))
    if host not in LOOPBACK and len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"refusing to show the files on {host} without a key: set ART_API_KEY to at least {MIN_KEY_LENGTH} random "
            "characters, e.g. of `openssl rand -hex 32`"
        )
    from art.cli.view_server import serve

    return serve(data_dir, host, port, key or secrets.token_urlsafe(24), opens)


def add_export_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("export")
    group.add_argument("--export", type=Path, metavar="FOLDER", help="write a copy of the page that needs no program")
    group.add_argument(
        "--run", action="append", default=[], metavar="PROJECT/NAME", dest="runs",
        help="run to export; may be given several times (default: the newest ten)",
    )  # fmt: skip
    group.add_argument("--steps", help="steps whose rollouts are exported, e.g. 1-10,50 (default: 12 over the run)")
    # The defaults are those of `ExportOptions`, which cannot be imported without the extra `local`.
    for name, usual, what in (
        ("rollouts", 64, "rollouts of each split and step"),
        ("tokens", 16, "of these, those with exact tokens"),
        ("max-mb", 100, "size of all rollouts, before compression"),
    ):
        group.add_argument(f"--{name}", type=int, default=usual, metavar="N", help=f"{what} (default: {usual})")
