"""Options that commands which train on a judge have in common, beside those of `art train`."""

from __future__ import annotations

import argparse
from pathlib import Path

from art.cli.judged_run import VALIDATIONS


def add_place_options(parser: argparse.ArgumentParser, *, project: str) -> None:
    parser.add_argument("--project", default=project, help=f"project name (default: {project})")
    parser.add_argument("--data-dir", type=Path, default=Path(".art"), help="where models are kept (default: .art)")


def add_generator_options(group: argparse._ArgumentGroup) -> None:
    """Of the model that writes scenarios."""
    group.add_argument("--generator", metavar="MODEL", help="who writes them, as litellm names it (default: the judge)")
    group.add_argument("--generator-url", metavar="URL", help="of an OpenAI-compatible server that answers for it")
    group.add_argument("--instructions", metavar="TEXT", help="what they should be about, in your words")


def add_evaluation_options(parser: argparse.ArgumentParser, what: str) -> None:
    """
    Args:
        what: is judged: "rollouts of each held-out scenario".
    """
    parser.add_argument(
        "--evaluate", type=_count, default=4, metavar="N",
        help=f"{what}, before and after (default: 4; 0 for no evaluation)",
    )  # fmt: skip
    parser.add_argument(
        "--validate-every", type=_count, metavar="N",
        help="steps between looks at how far the policy has come from the untrained one, both judged together "
        f"(default: {VALIDATIONS} times in all; 0 for never)",
    )  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text!r}")
    return int(text)
