"""Downloads a checkpoint or export file by file. A broken download is resumed, and every file is verified.

Files are written to a hidden folder beside the target, which is renamed at the end. If the program is stopped before,
the folder stays and the next call continues with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from functools import partial
from pathlib import Path

from art.client.http import HttpClient, LostAnswerError
from art.errors import ArtError, ConfigError, CorruptCheckpointError
from art.protocol.checkpoint_calls import FileInfo, FileList

MAX_CORRUPT = 2
"""Number of times that a file may arrive with the wrong SHA-256 hash before the download fails."""
PARTIAL_CONTENT = 206


async def download(client: HttpClient, place: str, target: Path) -> FileList:
    """Download the files at `place`, a path of the API, as the folder `target`. An equal folder stays as it is.

    Raises:
        ConfigError: `target` exists with other content.
        CorruptCheckpointError: a file arrived damaged again and again.
        ArtError: the server refused.
    """
    listed = await client.typed(FileList, "GET", f"{place}/files")
    for info in listed.files:
        if Path(info.name).name != info.name or info.name in ("", ".", ".."):
            raise ArtError(f"{client.base_url} lists a file {info.name!r}, which is no plain file name")
    partial = await asyncio.to_thread(_prepare, target, listed.files)
    if partial is None:
        return listed
    for info in listed.files:
        await _fetch(client, f"{place}/files/{info.name}", partial / info.name, info)
    await asyncio.to_thread(partial.rename, target)
    return listed


def _prepare(target: Path, files: list[FileInfo]) -> Path | None:
    """The folder to download into, with the files of an interrupted call; `None` if the target is complete."""
    if target.exists():
        if all((target / info.name).is_file() and _digest(target / info.name) == info.sha256 for info in files):
            return None
        raise ConfigError(f"{target} exists and is not this checkpoint; give another path, or remove it", param="path")
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    names = {info.name for info in files}
    for entry in partial.iterdir():
        if entry.name not in names:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return partial


async def _fetch(client: HttpClient, path: str, file: Path, info: FileInfo) -> None:
    num_corrupt = 0
    while True:
        if (here := _size(file)) >= info.size:
            if await asyncio.to_thread(_is_whole, file, info):
                return
            here, num_corrupt = 0, num_corrupt + 1  # e.g. part of another version of the file
            if num_corrupt > MAX_CORRUPT:
                raise CorruptCheckpointError(f"{client.base_url}{path} came {num_corrupt} times with another sha256")
        await client.until_answered(partial(_receive_more, client, path, file, here, info), f"GET {path}")


async def _receive_more(client: HttpClient, path: str, file: Path, here: int, info: FileInfo) -> None:
    try:
        await _receive(client, path, file, here, info)
    except LostAnswerError:
        if _size(file) <= here:
            raise


async def _receive(client: HttpClient, path: str, file: Path, here: int, info: FileInfo) -> None:
    headers = {"Range": f"bytes={here}-", "If-Range": f'"{info.sha256}"'} if here > 0 else {}
    async with client.stream(path, headers=headers) as response:
        resumed = response.status_code == PARTIAL_CONTENT
        here = here if resumed else 0
        with file.open("ab" if resumed else "wb") as writer:
            async for piece in response.aiter_bytes():
                writer.write(piece)
                here += len(piece)
    if here < info.size:
        raise LostAnswerError(f"the answer ended at byte {here} of {info.size}")


def _size(file: Path) -> int:
    """Size in bytes, and -1 if there is no file: an empty file exists."""
    return file.stat().st_size if file.exists() else -1


def _is_whole(file: Path, info: FileInfo) -> bool:
    """Whether the file has the listed hash; if not, it is deleted."""
    whole = _digest(file) == info.sha256
    if not whole:
        file.unlink()
    return whole


def _digest(file: Path) -> str:
    with file.open("rb") as reader:
        return hashlib.file_digest(reader, "sha256").hexdigest()
