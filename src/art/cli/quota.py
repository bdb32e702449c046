"""`art quota`: what projects may use in a calendar month (UTC).

    art quota set search --tokens 200000000 --usd 500
    art quota set --every-project --steps 1000         projects without a quota of their own
    art quota clear search
    art quota list

Above its quota a project's further requests and training calls are refused with the status 429; what runs is finished.
The server counts the same from the next request on. It is at --url or ART_SERVER_URL, and ART_API_KEY has the
operator's key, or one with the scope `admin` for all projects.
"""

from __future__ import annotations

import argparse

from art.cli.usage import asked, describe, limits
from art.errors import ConfigError
from art.protocol.organisation.usage_report import Quota


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="of the server (default: ART_SERVER_URL)")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="show what each project has used of its quota")
    setting = actions.add_parser("set", help="replace the quota of a project by the limits that are given")
    setting.add_argument("--tokens", type=int, metavar="N", help="prompt and sampled tokens")
    setting.add_argument("--steps", type=int, metavar="N", help="training steps")
    setting.add_argument("--device-hours", type=float, metavar="N", help="hours of devices, of sampling and training")
    setting.add_argument("--usd", type=float, metavar="X", help="costs by the server's `prices`")
    clearing = actions.add_parser("clear", help="remove the quota of a project")
    for action in (setting, clearing):
        action.add_argument("project", nargs="?", help="name of the project")
        action.add_argument("--every-project", action="store_true", help="those without a quota of their own")


def run(args: argparse.Namespace) -> int:
    if args.action == "list":
        print(describe(asked(args.url, lambda client: client.usage())))
        return 0
    if (args.project is None) != args.every_project:
        raise ConfigError("name one project, or give --every-project")
    quota = Quota()
    if args.action == "set":
        device_s = None if args.device_hours is None else args.device_hours * 3600
        quota = Quota(tokens=args.tokens, steps=args.steps, device_s=device_s, usd=args.usd)
        if quota == Quota():
            raise ConfigError("give at least one limit: --tokens, --steps, --device-hours or --usd")
    report = asked(args.url, lambda client: client.set_quota(args.project, quota))
    who = args.project or "Every project without a quota of its own"
    if quota == Quota() and report.default_quota is not None:
        who, quota = f"{who}, like every project without a quota of its own,", report.default_quota
    print(f"{who} may use {', '.join(limits(quota)) or 'any amount'} a month")
    return 0
