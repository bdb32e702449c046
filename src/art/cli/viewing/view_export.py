"""`art view --export`: write the page with its answers into a folder."""

from __future__ import annotations

import argparse
import contextlib
import time

from art.cli.terminal.plain import PlainLines
from art.cli.viewing.export_options import MIB
from art.cli.viewing.view_json import await_index
from art.errors import ConfigError
from art.server.paths import HiddenPaths
from art.storage.layout import DataDir
from art.viewer.export import ExportOptions, export_folder, parse_ranges
from art.viewer.viewer import Viewer

SILENCE_S = 5.0
"""Seconds between two lines about how far an export is."""


def export(args: argparse.Namespace, data_dir: DataDir) -> int:
    """Write the export, and print what it has, what it lacks, and its size.

    Raises:
        ConfigError: an option is out of range, or the folder has other files.
        NotFoundError: a run does not exist.
    """
    for name in ("rollouts", "tokens", "max_mb"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more, got {getattr(args, name)}")
    options = ExportOptions(
        runs=tuple(_parse_run(text) for text in args.runs), steps=parse_ranges(args.steps) if args.steps else None,
        num_rollouts=args.rollouts, num_tokens=args.tokens, max_bytes=args.max_mb * MIB,
    )  # fmt: skip
    said_at = time.monotonic()

    def on_progress(text: str) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= SILENCE_S:
            said_at = time.monotonic()
            PlainLines().print(text)

    with contextlib.closing(Viewer(data_dir)) as viewer:
        await_index(viewer, None, None, on_progress)
        result = export_folder(viewer, args.export, options, HiddenPaths(data_dir.root).hide, on_progress)
    counts, num_runs = result.counts, f"{result.num_runs} run{'s' * (result.num_runs > 1)}"
    print(
        f"{args.export / 'index.html'}: {num_runs}, {counts.num_rollouts} rollouts of {counts.num_steps} steps; "
        f"{result.num_files} files, {result.size_bytes / MIB:.1f} MiB, about "
        f"{result.compressed_bytes / MIB:.1f} MiB as a zip file"
    )
    for sentence in result.left_out:
        print(f"left out: {sentence}")
    return 0


def _parse_run(text: str) -> tuple[str, str]:
    project, slash, name = text.partition("/")
    if not (project and slash and name) or "/" in name:
        raise ConfigError(f"--run takes PROJECT/NAME, got {text!r}")
    return project, name
