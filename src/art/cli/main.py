"""`art`: the command line.

Each command is the module of this package that has its name, with `add_options` and `run`. It is imported only when it
is called. Its docstring is the description in `--help`. Options that are settings are made from the settings classes
(`arguments.add_settings`).

A shell completes commands and options after `eval "$(register-python-argcomplete art)"`.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

import art
from art.backends.platforms import check_server_platform
from art.cli.output import how_to_install, until_unread
from art.client.interrupt import EXIT_INTERRUPTED, stopped
from art.errors import ArtError, ConfigError
from art.storage.log_lines import LogFormatter, clean, known_secrets

COMMANDS = {
    "new": "write an agent of your own to start from",
    "demo": "train a tiny agent on this machine and show that it got better",
    "train": "train a task's agent",
    "tasks": "list the tasks, or show one with its options",
    "compare": "compare models on the same held-out scenarios: trained, local, and of any OpenAI-compatible endpoint",
    "auto": "train an agent from one sentence",
    "mcp-rl": "train an agent for the tools of an MCP server, without labels",
    "doctor": "check a model, this machine and a task before training",
    "checkpoints": "list, promote, fetch, delete, fork, merge, export and push checkpoints of a server",
    "promote": "let a checkpoint answer requests to the promoted name, if its held-out improvement is certain",
    "usage": "show what each project has used this month: tokens, steps, device hours, money",
    "quota": "limit what projects may use in a month",
    "view": "open the page about a data directory, export it, or print its answers as JSON",
    "status": "show what the server of a data directory does, and who waits for whom",
    "judge": "measure a judge: noise, order bias, agreement, cost; serve one without network",
    "launch": "start a server on another machine, and look after it",
    "keys": "make, list, rotate and revoke the keys of a server",
    "tiny-model": "make a tiny model with its tokenizer, warm-started for a task",
}


class StderrHandler(logging.Handler):
    """A log handler for the current `sys.stderr`, which a progress bar replaces to keep messages above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    return until_unread(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:  # a shell asks how the command line may go on
        import argcomplete

        argcomplete.autocomplete(build_parser(os.environ["COMP_LINE"].split()[1:]))
    try:
        args = build_parser(arguments).parse_args(arguments)
        args.argv = arguments
        if argv is None:
            sys.path.append(os.getcwd())  # for the user's own tasks; an installed program starts without it
        handler = StderrHandler()
        handler.setFormatter(LogFormatter("%(levelname)s %(name)s: %(message)s", known_secrets()))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        status: int = args.run(args)
    except ArtError as error:
        print(clean(f"art: {error}", known_secrets()), file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (words := how_to_install(error)) is None:
            raise
        print(f"art: {words}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nart: {stopped()}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return status


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser of `art`. It has options only for the command that `arguments` name, and imports only that."""
    parser = argparse.ArgumentParser(prog="art", description="On-the-job reinforcement learning for LLM agents.")
    parser.add_argument("--version", action="version", version=f"art {art.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == chosen:
            module = importlib.import_module(f"art.cli.{name.replace('-', '_')}")
            module.add_options(command)
            command.description = module.__doc__
            command.set_defaults(run=module.run)
    return parser


def serve() -> int:
    """Run `art-server`, whose modules cannot be imported on Windows or without the extra `local`."""
    try:
        check_server_platform("art-server")
        from art.cli.server import main as serve_until_stopped
    except ConfigError as error:
        print(f"art-server: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (words := how_to_install(error)) is None:
            raise
        print(f"art-server: {words}", file=sys.stderr)
        return 1
    return serve_until_stopped()


if __name__ == "__main__":
    sys.exit(main())
