"""Folders that appear complete or not at all: filled under a temporary name, given a manifest, then renamed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from art.errors import StorageError
from art.protocol.checkpoint_calls import HubTarget
from art.storage import checkpoints
from art.storage.atomic import new_directory

OnBytes = Callable[[int, int], None]
"""Called with the number of bytes that are done, and of all bytes."""
CHUNK_BYTES = 16 * 2**20


@contextlib.contextmanager
def new_folder(target: Path, *, manifest: bool) -> Iterator[Path]:
    """Yield an empty folder to fill. After the block it becomes `target` and replaces what was there.

    Args:
        manifest: write a manifest of the files; otherwise the block must leave one.
    """
    with new_directory(target, replace=True) as folder:
        yield folder
        if manifest:
            checkpoints.write_manifest(folder)


def copy_files(source: Path, target: Path, names: list[str], on_bytes: OnBytes) -> None:
    """Copy files in pieces, since they may be larger than memory."""
    total, done = sum((source / name).stat().st_size for name in names), 0
    for name in names:
        with (source / name).open("rb") as reader, (target / name).open("wb") as writer:
            while piece := reader.read(CHUNK_BYTES):
                writer.write(piece)
                done += len(piece)
                on_bytes(done, total)


def copy_checkpoint(source: Path, target: Path, on_bytes: OnBytes) -> None:
    """Copy a checkpoint to another folder and verify the copy.

    Raises:
        CorruptCheckpointError: the source is damaged. No copy is left.
    """
    with new_folder(target, manifest=False) as folder:
        copy_files(source, folder, [*checkpoints.list_files(source), checkpoints.MANIFEST], on_bytes)
        checkpoints.verify(folder)


def push_to_hub(folder: Path, target: HubTarget, message: str) -> str:
    """Upload a folder as one commit and return its address. The repository is created if it does not exist.

    Raises:
        StorageError: the hub refused, or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(target.repo_id, private=target.private, exist_ok=True)
        if target.revision is not None:
            api.create_branch(target.repo_id, branch=target.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=target.repo_id, folder_path=folder, revision=target.revision, commit_message=message
        )
    except Exception as error:  # the hub's errors, httpx's and bad repository names have no narrower class in common
        raise StorageError(f"cannot push to {target.repo_id!r}: {type(error).__name__}: {error}") from error
    return f"{made}@{commit.oid}"
