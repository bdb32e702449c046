"""`art view --json`: the answers of the page for programs, from files or from a running server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence

from art.client import ArtClient
from art.storage.layout import DataDir
from art.storage.local_key import find_local_key
from art.viewer.paths import PATHS, find_path, query_parameters
from art.viewer.viewer import Viewer

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
