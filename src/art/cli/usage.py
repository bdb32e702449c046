"""`art usage`: what each project has used this month, of its quota.

    art usage
    art usage --project search --month 2026-01
    art usage --models                            by model too
    art usage --keys                              by API key too
    art usage --json                              as the server sends it

Device hours are those of sampling and training together. A key for one project sees its own project, and without scope
`admin` the other keys as one. The server is at --url or ART_SERVER_URL, and the key is in ART_API_KEY. `art quota` sets
the limits.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

from art.client import ArtClient
from art.errors import ConfigError
from art.protocol.organisation.usage_report import KeyUsage, ModelUsage, ProjectUsage, Quota, UsageReport, Used
from art.storage.local_key import find_local_key

T = TypeVar("T")
_COLUMNS = ("project", "prompt tokens", "cached", "sampled", "steps", "device hours", "USD", "quota")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="of the server (default: ART_SERVER_URL)")
    parser.add_argument("--month", help="as YEAR-MONTH, e.g. 2026-01 (default: the current one, in UTC)")
    parser.add_argument("--project", help="only this project")
    parser.add_argument("--models", action="store_true", help="also show each model")
    parser.add_argument("--keys", action="store_true", help="also show each API key")
    parser.add_argument("--json", action="store_true", help="print the server's answer")


def run(args: argparse.Namespace) -> int:
    report = asked(args.url, lambda client: client.usage(month=args.month, project=args.project, keys=args.keys))
    print(report.model_dump_json(indent=2) if args.json else describe(report, with_models=args.models))
    return 0


def asked(url: str | None, ask: Callable[[ArtClient], Awaitable[T]]) -> T:
    """Connect to a server, ask it, and return the answer.

    Raises:
        ConfigError: there is no address.
    """
    if not (address := url or os.environ.get("ART_SERVER_URL")):
        raise ConfigError("give the address of the server by --url or ART_SERVER_URL")

    async def act() -> T:
        async with ArtClient(address, os.environ.get("ART_API_KEY") or find_local_key(address)) as client:
            return await ask(client)

    return asyncio.run(act())


def describe(report: UsageReport, *, with_models: bool = False) -> str:
    """Write a report as a table, with a line about the month. Keys are shown if the report has them."""
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for project in report.projects:
        rows.append(_row(project.project, project, _quota(project)))
        if with_models:
            rows += [_row(f"  {model.name}", model, "") for model in project.models]
        rows += [_row(f"  {_key_name(key)}", key, "") for key in project.keys or ()]
    if len(report.projects) > 1:
        rows.append(_row("total", _total(report.projects), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.rjust(width) if 0 < i < len(_COLUMNS) - 1 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    ends = f"Usage of {report.month}; quotas reset on {report.resets_at}."
    if (default := report.default_quota) is not None:
        ends += f" Projects without a quota of their own: {'; '.join(limits(default))}."
    return "\n".join([*lines, ends])


def limits(quota: Quota) -> list[str]:
    """Describe the limits of a quota, one phrase each."""
    parts = []
    if quota.tokens is not None:
        parts.append(f"{quota.tokens:,} tokens")
    if quota.steps is not None:
        parts.append(f"{quota.steps:,} steps")
    if quota.device_s is not None:
        parts.append(f"{quota.device_s / 3600:,.2f} device hours")
    if quota.usd is not None:
        parts.append(f"{quota.usd:,.2f} USD")
    return parts


def _row(name: str, used: Used, quota: str) -> tuple[str, ...]:
    device_s = used.sampling_s + used.training_s
    counts = (f"{count:,}" for count in (used.prompt, used.cached, used.completion, used.steps))
    return (name, *counts, f"{device_s / 3600:,.2f}", f"{used.usd:,.2f}", quota)


def _key_name(key: KeyUsage) -> str:
    """Name a key by what it was made for, with its id: replaced keys have the name of the old one."""
    if key.key_id is None:
        return key.name or "key not known"
    return f"{key.name or 'key'} ({key.key_id})"


def _quota(project: ProjectUsage) -> str:
    """Say which share of each limit is used."""
    if (quota := project.quota) is None:
        return "none"
    used = (
        project.prompt + project.completion, project.steps, project.sampling_s + project.training_s, project.usd
    )  # fmt: skip
    most = (quota.tokens, quota.steps, quota.device_s, quota.usd)
    pairs = [(amount, limit) for amount, limit in zip(used, most, strict=True) if limit is not None]
    shares = [amount / limit if limit else 1.0 for amount, limit in pairs]
    return ", ".join(f"{share:.0%} of {text}" for share, text in zip(shares, limits(quota), strict=True))


def _total(projects: list[ProjectUsage]) -> ModelUsage:
    values = {name: sum(getattr(project, name) for project in projects) for name in Used.model_fields}
    return ModelUsage(name="total", **values)
