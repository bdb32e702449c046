"""The folder of the repository that a script is run in."""

from __future__ import annotations

from pathlib import Path


def get_repo_root_path() -> str:
    """The folder of the git repository around the working directory, or that directory itself without one."""
    here = Path.cwd()
    return str(next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here))
