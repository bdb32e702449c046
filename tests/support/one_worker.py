"""Deals files to the processes of pytest-xdist: those of `shared_backend` to one process, so that it starts once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[2]
FIXTURE = "shared_backend"


@cache
def scope_of_file(path: str) -> str:
    """Return what the tests of a file are dealt with: the other files with the shared server, or only each other."""
    is_shared = path.startswith("tests/e2e/") and FIXTURE in (ROOT / path).read_text()
    return FIXTURE if is_shared else path


class FilesWithOneServer(LoadScopeScheduling):
    """Deals whole files, as `--dist loadscope` does, and the files of the shared server together."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of_file(nodeid.partition("::")[0])
