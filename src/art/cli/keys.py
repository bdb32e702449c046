"""`art keys`: the keys with which people and programs use a server.

    art keys create --name ci --project games --scope infer --scope train --expires 90d
    art keys list
    art keys rotate 3f9c01d2ab47 --grace 24h
    art keys revoke 3f9c01d2ab47

It works on the data directory and needs no key itself: anybody who may write there operates the server. A running
server sees each change with its next request. Standard output gets only a new key, and standard error the words about
it, so that KEY=$(art keys create --name ci) works.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from art.errors import NotFoundError
from art.protocol.keys import KeyScope
from art.storage.keys import Key, KeyStore, format_time
from art.storage.layout import DataDir

DEFAULT_DATA_DIR = ".art"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_COLUMNS = ("id", "name", "project", "scopes", "created", "last used", "state")


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="make a key and print it; it is shown this once")
    create.add_argument("--name", required=True, help="what it is for, e.g. `ci` or a person")
    create.add_argument("--project", help="the only project that it opens (default: all)")
    create.add_argument(
        "--scope", action="append", choices=get_args(KeyScope), dest="scopes",
        help="what it may do; give it several times for several (default: infer and train)",
    )  # fmt: skip
    create.add_argument("--expires", type=_duration, metavar="TIME", help="from now, e.g. 90d or 12h (default: never)")
    actions.add_parser("list", help="show all keys, without their secrets")
    rotate = actions.add_parser("rotate", help="make a new key in the place of another")
    rotate.add_argument("id", help="of the key to be replaced")
    grace = "how long that still works, e.g. 24h"
    rotate.add_argument("--grace", type=_duration, default=0.0, metavar="TIME", help=grace)
    revoke = actions.add_parser("revoke", help="end a key at once")
    revoke.add_argument("id")
    for action in actions.choices.values():
        action.add_argument("--data-dir", type=Path, help=f"of the server (default: {DEFAULT_DATA_DIR})")


def run(args: argparse.Namespace) -> int:
    is_default = args.data_dir is None
    data_dir = DataDir(Path(DEFAULT_DATA_DIR if is_default else args.data_dir).expanduser().resolve())
    is_new = not data_dir.is_known
    if is_new and (is_default or args.action != "create"):
        earlier = "; where it is named, a key can be made before the first start too"
        raise NotFoundError(
            f"no art-server has ever run on {data_dir.root}; name its data directory by --data-dir"
            + (earlier if args.action == "create" else "")
        )
    store = KeyStore(data_dir.keys)
    try:
        _act(store, args)
    finally:
        store.close()
    if is_new:
        _note(f"no art-server has run on {data_dir.root} yet: the key opens one that is started with this --data-dir")
    return 0


def _note(text: str) -> None:
    """Print to standard error, because standard output gets only a key: `KEY=$(art keys create ...)`."""
    print(text, file=sys.stderr)


def _act(store: KeyStore, args: argparse.Namespace) -> None:
    if args.action == "list":
        print(*_table([_COLUMNS, *map(_row, store.list())]), sep="\n")
        return
    if args.action == "revoke":
        key = store.revoke(args.id)
        print(f"key {key.id} ({key.name}) is revoked")
        return
    if args.action == "rotate":
        new, text = store.rotate(args.id, grace_s=args.grace)
        until = f"until {format_time(time.time() + args.grace)}" if args.grace else "no longer"
        print(text)
        _note(f"key {new.id} takes the place of {args.id}, which works {until}")
        return
    expires_at = None if args.expires is None else time.time() + args.expires
    key, text = store.create(
        args.name, project=args.project, scopes=args.scopes or ("infer", "train"), expires_at=expires_at
    )
    what = f"{' and '.join(sorted(key.scopes))}, {key.project or 'all projects'}"
    print(text)
    _note(f"key {key.id} ({key.name}: {what}); it is stored nowhere, so keep it")


def _row(key: Key) -> tuple[str, ...]:
    now = time.time()
    state = "active"
    if problem := key.problem(now):
        state = problem.removeprefix(f"key {key.id} ").removeprefix("was ")
    elif ends := [at for at in (key.expires_at, key.revoked_at) if at is not None]:
        state = f"active until {format_time(min(ends))}"
    used = format_time(key.last_used_at) if key.last_used_at else "never"
    scopes = ",".join(sorted(key.scopes))
    return key.id, key.name, key.project or "(all)", scopes, format_time(key.created_at), used, state


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; expected a number and s, m, h or d, such as 90d")
    return int(match[1]) * _UNITS[match[2]]
