"""What `art view` gives of a folder without its page: answers as JSON for programs, and a copy of the page."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence

from art.cli.output import PlainLines
from art.client import ArtClient
from art.errors import ConfigError
from art.server.paths import HiddenPaths
from art.storage.layout import DataDir
from art.storage.local_key import find_local_key
from art.viewer.export import ExportOptions, export_folder, parse_ranges
from art.viewer.paths import PATHS, find_path, query_parameters
from art.viewer.viewer import Viewer

MIB = 2**20
INDEX_WAIT_S = 3600.0
"""Longest wait for the index. A million rollouts take minutes."""


def print_paths() -> None:
    """Print every path with its parameters, one on a line."""
    width = max(len(row.path) for row in PATHS)
    for row in PATHS:
        names = ", ".join(query_parameters(row))
        print(f"{row.path:{width}}  {row.summary}" + (f" (?{names})" if names else ""))
    print("\nExample: art view .art --json 'runs/games/agent-001/rollouts?step=12&sort=reward&limit=5'")


def print_answers(paths: Sequence[str], data_dir: DataDir | None, url: str | None) -> int:
    """Print one line of JSON for each path. From files, the answers wait until all rollouts are indexed.

    Raises:
        NotFoundError: there is no such path, run, step or rollout.
        InvalidRequestError: a parameter is wrong.
    """
    if data_dir is None:
        assert url is not None
        print("\n".join(asyncio.run(_ask_server(paths, url))))
        return 0
    with contextlib.closing(Viewer(data_dir)) as viewer:
        for text in paths:
            row, asked = find_path(text)
            await_index(viewer, asked.values.get("project"), asked.values.get("name"))
            print(row.read(viewer, asked).model_dump_json())
    return 0


def await_index(
    viewer: Viewer, project: str | None, name: str | None, on_wait: Callable[[str], None] = lambda text: None
) -> None:
    """Wait until the rollouts of a run, or of all runs, are indexed, so that an answer lacks none.

    Args:
        on_wait: called each second of the wait with how far it is, in words.
    """
    runs = [(project, name)] if project and name else [(run.project, run.name) for run in viewer.runs().runs]
    for run in runs:
        until = time.monotonic() + INDEX_WAIT_S
        while (indexing := viewer.indexer.ensure(*run, wait_s=1.0)[1]) is not None and time.monotonic() < until:
            on_wait(f"indexing {'/'.join(run)}: {indexing.done_bytes / max(indexing.total_bytes, 1):.0%}")


async def _ask_server(paths: Sequence[str], url: str) -> list[str]:
    key = os.environ.get("ART_API_KEY") or find_local_key(url)
    async with ArtClient(url, key) as client:
        return [(await client.request("GET", f"/view/api/{text.lstrip('/')}")).decode() for text in paths]


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
