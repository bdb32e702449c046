"""What the operator of a server does: `art keys`, `art usage`, `art quota`. They need the core package only."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar, get_args

from art.cli.arguments import server_address
from art.cli.output import duration, print_table
from art.client.client import ServerClient
from art.errors import ConfigError, NotFoundError
from art.protocol.keys import KeyScope
from art.protocol.usage_report import ModelUsage, ProjectUsage, Quota, UsageReport, Used
from art.storage.keys import Key, KeyStore, format_time
from art.storage.layout import DataDir
from art.storage.local_key import find_local_key

T = TypeVar("T")
DEFAULT_DATA_DIR = ".art"
_USAGE_COLUMNS = ("project", "prompt tokens", "cached", "sampled", "steps", "device hours", "USD", "quota")


def add_keys_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="make a key and print it; it is shown this once")
    create.add_argument("--name", required=True, help="what it is for, e.g. `ci` or a person")
    create.add_argument("--project", help="the only project that it opens (default: all)")
    create.add_argument(
        "--scope", action="append", choices=get_args(KeyScope), dest="scopes",
        help="what it may do; give it several times for several (default: infer and train)",
    )  # fmt: skip
    create.add_argument("--expires", type=duration, metavar="TIME", help="its life, e.g. 90d or 12h (default: no end)")
    actions.add_parser("list", help="show all keys, without their secrets")
    revoke = actions.add_parser("revoke", help="end a key at once")
    revoke.add_argument("id", help="id of the key, which `art keys list` shows")
    for action in actions.choices.values():
        action.add_argument("--data-dir", type=Path, help=f"data directory of the server (default: {DEFAULT_DATA_DIR})")


def run_keys(args: argparse.Namespace) -> int:
    """`art keys`: make, list and revoke the keys with which people and programs use a server.

        art keys create --name ci --project games --scope infer --expires 90d
        art keys list
        art keys revoke 3f9c01d2ab47

    It works on the data directory and needs no key itself: anybody who may write there operates the server. A running
    server sees each change with its next request. Standard output gets only a new key, and standard error the words
    about it, so that KEY=$(art keys create --name ci) works.
    """
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
        if args.action == "list":
            print_table([("id", "name", "project", "scopes", "created", "state"), *map(_key_row, store.list())])
        elif args.action == "revoke":
            key = store.revoke(args.id)
            print(f"key {key.id} ({key.name}) is revoked")
        else:
            expires_at = None if args.expires is None else time.time() + args.expires
            scopes: Sequence[KeyScope] = args.scopes or ("infer", "train")
            key, text = store.create(args.name, project=args.project, scopes=scopes, expires_at=expires_at)
            what = f"{' and '.join(sorted(key.scopes))}, {key.project or 'all projects'}"
            print(text)
            print(f"key {key.id} ({key.name}: {what}); it is stored nowhere, so keep it", file=sys.stderr)
    finally:
        store.close()
    if is_new:
        words = "yet: the key opens one that is started with this --data-dir"
        print(f"no art-server has run on {data_dir.root} {words}", file=sys.stderr)
    return 0


def _key_row(key: Key) -> tuple[str, ...]:
    state = "active" if key.expires_at is None else f"active until {format_time(key.expires_at)}"
    if problem := key.problem(time.time()):
        state = problem.removeprefix(f"key {key.id} ").removeprefix("was ")
    scopes = ",".join(sorted(key.scopes))
    return key.id, key.name, key.project or "(all)", scopes, format_time(key.created_at), state


# -- usage --


def add_usage_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="address of the server (default: ART_SERVER_URL)")
    parser.add_argument("--month", help="as YEAR-MONTH, e.g. 2026-01 (default: the current one, in UTC)")
    parser.add_argument("--project", help="only this project")
    parser.add_argument("--models", action="store_true", help="also show each model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the server's answer")


def run_usage(args: argparse.Namespace) -> int:
    """`art usage`: show what each project has used this month, of its quota.

        art usage
        art usage --project search --month 2026-01
        art usage --models                            by model too
        art usage --json usage.json                   as the server sends it

    Device hours are those of training. A key for one project sees its own project. The server is at --url or
    ART_SERVER_URL, and the key is in ART_API_KEY. `art quota` sets the limits.
    """
    report = ask_server(args.url, lambda client: client.usage(month=args.month, project=args.project))
    print(describe_usage(report, with_models=args.models))
    if args.json:
        args.json.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return 0


def ask_server(url: str | None, ask: Callable[[ServerClient], Awaitable[T]]) -> T:
    """Connect to the server at `url` or ART_SERVER_URL, ask it, and return the answer. Raises `ConfigError` if there is
    no address."""
    address = server_address(url)

    async def act() -> T:
        async with ServerClient(address, os.environ.get("ART_API_KEY") or find_local_key(address)) as client:
            return await ask(client)

    return asyncio.run(act())


def describe_usage(report: UsageReport, *, with_models: bool = False) -> str:
    """Write a report as a table, with a line about the month."""
    rows: list[tuple[str, ...]] = [_USAGE_COLUMNS]
    for project in report.projects:
        rows.append(_usage_row(project.project, project, _describe_quota(project)))
        if with_models:
            rows += [_usage_row(f"  {model.name}", model, "") for model in project.models]
    if len(report.projects) > 1:
        sums = {name: sum(getattr(project, name) for project in report.projects) for name in Used.model_fields}
        rows.append(_usage_row("total", ModelUsage(name="total", **sums), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    lines = [
        "  ".join(
            cell.rjust(width) if 0 < i < last else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    ends = f"Usage of {report.month}; quotas reset on {report.resets_at}."
    if (default := report.default_quota) is not None:
        ends += f" Projects without a quota of their own: {'; '.join(describe_limits(default))}."
    return "\n".join([*lines, ends])


def describe_limits(quota: Quota) -> list[str]:
    """Describe the limits of a quota, one phrase each."""
    hours = None if quota.device_s is None else quota.device_s / 3600
    phrases = (
        (quota.tokens, "{:,} tokens"), (quota.steps, "{:,} steps"), (hours, "{:,.2f} device hours"),
        (quota.usd, "{:,.2f} USD"),
    )  # fmt: skip
    return [form.format(limit) for limit, form in phrases if limit is not None]


def _usage_row(name: str, used: Used, quota: str) -> tuple[str, ...]:
    device_s = used.sampling_s + used.training_s
    counts = (f"{count:,}" for count in (used.prompt, used.cached, used.completion, used.steps))
    return (name, *counts, f"{device_s / 3600:,.2f}", f"{used.usd:,.2f}", quota)


def _describe_quota(project: ProjectUsage) -> str:
    """Say which share of each limit is used."""
    if (quota := project.quota) is None:
        return "none"
    used = (
        project.prompt + project.completion, project.steps, project.sampling_s + project.training_s, project.usd
    )  # fmt: skip
    most = (quota.tokens, quota.steps, quota.device_s, quota.usd)
    shares = [(amount / limit if limit else 1.0) for amount, limit in zip(used, most, strict=True) if limit is not None]
    return ", ".join(f"{share:.0%} of {text}" for share, text in zip(shares, describe_limits(quota), strict=True))


# -- quotas --


def add_quota_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="address of the server (default: ART_SERVER_URL)")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    setting = actions.add_parser("set", help="replace the quota of a project by the limits that are given")
    setting.add_argument("--tokens", type=int, metavar="N", help="prompt and sampled tokens")
    setting.add_argument("--steps", type=int, metavar="N", help="training steps in a month")
    setting.add_argument("--device-hours", type=float, metavar="N", help="hours of devices that train")
    setting.add_argument("--usd", type=float, metavar="X", help="costs by the server's `prices`")
    clearing = actions.add_parser("clear", help="remove the quota of a project")
    for action in (setting, clearing):
        action.add_argument("project", nargs="?", help="name of the project")
        action.add_argument("--every-project", action="store_true", help="those without a quota of their own")


def run_quota(args: argparse.Namespace) -> int:
    """`art quota`: limit what projects may use in a calendar month (UTC).

        art quota set search --tokens 200000000 --usd 500
        art quota set --every-project --steps 1000   those without their own quota
        art quota clear search

    Above its quota a project's further requests and training calls are refused with the status 429; what runs is
    finished. The server counts the same from the next request on. It is at --url or ART_SERVER_URL, and ART_API_KEY has
    the operator's key, or one with the scope `admin` for all projects. `art usage` shows what is used of each quota.
    """
    if (args.project is None) != args.every_project:
        raise ConfigError("name one project, or give --every-project")
    quota = Quota()
    if args.action == "set":
        device_s = None if args.device_hours is None else args.device_hours * 3600
        quota = Quota(tokens=args.tokens, steps=args.steps, device_s=device_s, usd=args.usd)
        if quota == Quota():
            raise ConfigError("give at least one limit: --tokens, --steps, --device-hours or --usd")
    report = ask_server(args.url, lambda client: client.set_quota(args.project, quota))
    who = args.project or "Every project without a quota of its own"
    if quota == Quota() and report.default_quota is not None:
        who, quota = f"{who}, like every project without a quota of its own,", report.default_quota
    print(f"{who} may use {', '.join(describe_limits(quota)) or 'any amount'} a month")
    return 0
