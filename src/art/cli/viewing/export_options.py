"""The options of `art view --export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from art.viewer.export import ExportOptions

MIB = 2**20
_USUAL = ExportOptions()


def add_export_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("export")
    group.add_argument("--export", type=Path, metavar="FOLDER", help="write a copy of the page that needs no program")
    group.add_argument(
        "--run", action="append", default=[], metavar="PROJECT/NAME", dest="runs",
        help="run to export; may be given several times (default: the newest ten)",
    )  # fmt: skip
    group.add_argument(
        "--steps", help=f"steps whose rollouts are exported, e.g. 1-10,50 (default: {_USUAL.num_steps} over the run)"
    )
    for name, usual, what in (
        ("rollouts", _USUAL.num_rollouts, "rollouts of each split and step"),
        ("tokens", _USUAL.num_tokens, "of these, those with exact tokens"),
        ("max-mb", _USUAL.max_bytes // MIB, "size of all rollouts, before compression"),
    ):
        group.add_argument(f"--{name}", type=int, default=usual, metavar="N", help=f"{what} (default: {usual})")
