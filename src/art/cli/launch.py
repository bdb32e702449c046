"""`art launch`: start an ART server on another machine, and look after it.

    art launch --gpu H100:1 --idle 30m                      on a machine that SkyPilot rents
    art launch --cloud ssh --host alice@gpu-box --gpu --model qwen-2.5-7b
    art launch status
    art launch tunnel gpu-box                    keep it running: it makes the server reachable here
    art launch logs gpu-box --follow
    art launch pull gpu-box games/agent --to ./checkpoints
    art launch stop gpu-box                      its data stays; the next launch goes on with it
    art launch down gpu-box --delete-data

A machine is reached by ssh only; no port of it is opened to a network. What was launched is recorded in
~/.art/launched (or ART_LAUNCHED_DIR).
"""

from __future__ import annotations

import argparse

from art.cli.launching import machines
from art.cli.launching.launched import Launched
from art.cli.output import run_coroutine

_NAMED = {
    "status": "show the servers that were launched here, or one of them",
    "logs": "print the last lines of a server's log, and with --follow what comes",
    "tunnel": "make a server reachable on this machine until Ctrl-C, and start it again whenever it dies",
    "pull": "fetch the newest checkpoints of a server's models",
    "stop": "stop a server; its data stays where it is",
    "down": "stop a server and delete its environment, key and settings; the record here stays as long as its data",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cloud", help="where: ssh for a machine that exists, or a cloud of SkyPilot's: aws, gcp, kubernetes ... "
        "(default: what the other options mean)",
    )  # fmt: skip
    parser.add_argument(
        "--name", help="of the record here, and of the server among those of the account (default: art for a rented "
        "machine; with ssh the record is named like the machine, and the server is in ~/.art/servers/default)",
    )  # fmt: skip
    parser.add_argument("--model", action="append", dest="models", metavar="MODEL", help="base model to load first")
    parser.add_argument(
        "--gpu", nargs="?", const=True, help="do not start without a CUDA device; with a value: rent such a machine"
    )
    parser.add_argument(
        "--source", help="what to install: index, a wheel, a folder of ART's source (default: what runs here)"
    )
    parser.add_argument("--extra", action="append", dest="extras", help="part of ART to install (default: local)")
    parser.add_argument("--python", help="Python 3.11 or newer on the machine (default: the first one found there)")
    parser.add_argument("--folder", help="of the server on the machine (default: ~/.art/servers/NAME, or .../default)")
    machines.add_options(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for name, summary in _NAMED.items():
        action = actions.add_parser(name, help=summary)
        action.add_argument("server", nargs="?", help="name of its record (default: the only one)")
        if name == "logs":
            action.add_argument("--lines", type=int, default=50, help="number of lines (default: 50)")
            action.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
        if name == "pull":
            action.add_argument("model", nargs="?", metavar="PROJECT/NAME", help="(default: all models)")
            action.add_argument("--to", default="checkpoints", metavar="FOLDER", help="(default: checkpoints)")
        if name == "down":
            action.add_argument("--delete-data", action="store_true", help="delete its models and checkpoints too")


def run(args: argparse.Namespace) -> int:
    from art.cli.launching import actions

    launched = Launched()
    if args.action is None:
        return run_coroutine(actions.launch(launched, args))
    if args.action == "status":
        return run_coroutine(actions.show_status(launched, args.server))
    return run_coroutine(actions.ACTIONS[args.action](launched, launched.find(args.server), args))
