"""Copy a data directory to another place, also while a server uses it: home, into a bucket, onto a new machine.

    held(copy)  ->  pack(root, held)  ->  unpack(stream, copy)      only what the copy lacks is sent

A copy is whole at every moment, also after a power cut. Databases are backed up before the files are read, and arrive
after them, so a copied database never names a checkpoint that is not in the copy. What can be made again is left out:
exports, merged models, logs and the index of the page.

    python -m art.backends.skypilot.copying pack DIR           to standard output what the copy on standard input lacks
    python -m art.backends.skypilot.copying restore DIR        from standard input into a data directory without server
    python -m art.backends.skypilot.copying copy DIR COPY      on one machine, such as into a mounted bucket
    python -m art.backends.skypilot.copying bring COPY DIR     back from there, into a data directory without server
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from art.errors import StorageError
from art.storage.atomic import storage_errors
from art.storage.layout import DataDir
from art.storage.lock import locked
from art.storage.portable import sync

MANIFEST = ".copied.json"
"""Lists, in a copy, the files that it holds. It is written last."""
_LIST, _END = ".list", ".end"
_LEFT_OUT = frozenset({"logs", "exports"})
_NOT_COPIED = ("server.lock", "-wal", "-shm")
_MAX_LIST_BYTES = 64 << 20
_LOCK = ".copying.lock"
LOCK_WAIT_S = 3600.0
"""Seconds that a copy waits for another one of the same folder."""


class Seen(NamedTuple):
    """Size in bytes of a file, and when it was last written. Equal values mean equal content."""

    size: int
    mtime_ns: int


Files = dict[str, Seen]
"""Files by their path in the data directory."""


@contextlib.contextmanager
def only_copy(folder: Path) -> Iterator[None]:
    """Keep other copies from or to the same folder out while the body runs. Two at once would mix their files.

    Raises:
        StorageError: another one does not end, or the folder cannot be written.
    """
    with locked(folder / _LOCK, what=f"copying {folder}", wait_s=LOCK_WAIT_S):
        yield


def held(target: Path) -> Files:
    """List the files of a copy; empty if there is none.

    Raises:
        StorageError: the list names a file outside of the copy.
    """
    try:
        return read_list((target / MANIFEST).read_bytes())
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def read_list(text: bytes) -> Files:
    """Read a list of files, which may come from a machine that nobody trusts: each is inside the copy.

    Raises:
        StorageError: the list names a file outside of the copy.
    """
    files = {name: Seen(*seen) for name, seen in json.loads(text).items()}
    for name in files:
        if ".." in Path(name).parts or Path(name).anchor:
            raise StorageError(f"the list of a copy names a file outside of its folder: {name!r}")
    return files


def list_files(root: Path) -> Files:
    """List the files of a data directory that belong into a copy, except its databases."""
    files: Files = {}
    for folder, names, here in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in _LEFT_OUT)
        for name in sorted(here):
            path = Path(folder, name)
            if name.startswith(".") or name.endswith(_NOT_COPIED) or path in _databases(root):
                continue
            with contextlib.suppress(FileNotFoundError):
                files[path.relative_to(root).as_posix()] = _seen(path)
    return files


def pack(root: Path, has: Mapping[str, Seen], out: IO[bytes]) -> int:
    """Write a tar stream of what a copy lacks.

    Args:
        root: the data directory. A server may be using it.
        has: what the copy holds already.

    Returns:
        Number of files that were written.

    Raises:
        StorageError: the directory cannot be read.
    """
    num_files = 0
    with tempfile.TemporaryDirectory() as folder, storage_errors(root, "copying"):
        backups = dict(_back_up(root, Path(folder)))
        files = list_files(root)
        databases = {name: seen for name, (_, seen) in backups.items()}
        with tarfile.open(fileobj=out, mode="w|") as tar:
            _add(tar, _LIST, json.dumps(files | databases).encode())
            for name, seen in files.items():
                if has.get(name) != seen and _add_file(tar, name, root / name, seen.size):
                    num_files += 1
            for name, (backup, seen) in backups.items():
                if has.get(name) != seen and _add_file(tar, name, backup, backup.stat().st_size):
                    num_files += 1
            _add(tar, _END, b"")
    return num_files


def unpack(stream: IO[bytes], target: Path, *, is_copy: bool = True) -> int:
    """Take what `pack` wrote, and remove what is no longer in the data directory.

    Args:
        is_copy: whether the target is a copy, with a list of its files, or a data directory for a server to use.

    Returns:
        Number of files that came.

    Raises:
        StorageError: the stream is not whole, or a file cannot be written. The copy is as whole as it was before.
    """
    before, num_files, files, is_whole = held(target), 0, None, False
    with storage_errors(target, "copying to"):
        target.mkdir(parents=True, exist_ok=True)
        try:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for entry in tar:
                    content = tar.extractfile(entry)
                    if content is None:
                        raise tarfile.TarError(f"{entry.name!r} is no file")
                    if entry.name == _LIST:
                        files = read_list(content.read(_MAX_LIST_BYTES))
                    elif entry.name == _END:
                        is_whole = True
                    elif files is not None and entry.name in files:
                        _write(target, entry.name, content)
                        num_files += 1
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise StorageError(f"the copy to {target} was interrupted: {error}") from error
        if not is_whole or files is None:
            raise StorageError(f"the copy to {target} was interrupted before its end; the next one goes on from there")
        for name in before.keys() - files.keys():
            (target / name).unlink(missing_ok=True)
        if is_copy:
            _write(target, MANIFEST, io.BytesIO(json.dumps(files).encode()))
    return num_files


def copy(root: Path, target: Path, *, is_copy: bool = True) -> int:
    """Bring a copy on the same machine up to date, for example in a mounted bucket.

    Args:
        is_copy: whether the target is a copy, or a data directory for a server to use, which is filled from a copy.

    Returns:
        Number of files that were copied.
    """
    if not is_copy:
        return _copy(root, target, {}, is_copy=False)
    with only_copy(root):  # not the target: a mounted bucket may have no locks
        return _copy(root, target, held(target), is_copy=True)


def _copy(root: Path, target: Path, has: Files, *, is_copy: bool) -> int:
    reader, writer = os.pipe()
    failures: list[BaseException] = []

    def write() -> None:
        with os.fdopen(writer, "wb") as out:
            try:
                pack(root, has, out)
            except BaseException as error:
                failures.append(error)

    thread = threading.Thread(target=write, name="copying")
    thread.start()
    try:
        with os.fdopen(reader, "rb") as stream:
            return unpack(stream, target, is_copy=is_copy)
    except StorageError:
        thread.join()
        if failures and not isinstance(failures[0].__cause__, BrokenPipeError):
            raise failures[0] from None  # the stream broke off because it could not be read to its end
        raise
    finally:
        thread.join()


def _databases(root: Path) -> tuple[Path, ...]:
    return (DataDir(root).database, DataDir(root).keys)


def _back_up(root: Path, folder: Path) -> Iterator[tuple[str, tuple[Path, Seen]]]:
    """Make a consistent copy of each database. Yields its name, the copy, and what the database looked like before."""
    # Nobody writes into a copy, and a mounted bucket may have no locks.
    mode = "mode=ro&immutable=1" if (root / MANIFEST).exists() else "mode=ro"
    for path in _databases(root):
        if not path.exists():
            continue
        log = path.with_name(f"{path.name}-wal")
        seen = [_seen(path), *([_seen(log)] if log.exists() and log.stat().st_size else [])]
        backup = folder / path.name
        try:
            with (
                contextlib.closing(sqlite3.connect(f"file:{path}?{mode}", uri=True)) as source,
                contextlib.closing(sqlite3.connect(backup)) as copied,
            ):
                source.backup(copied)
                copied.execute("PRAGMA journal_mode=DELETE")  # one file, which can be read where nothing can be written
        except sqlite3.Error as error:
            raise StorageError(f"copying {path} failed: {error}") from error
        yield path.name, (backup, Seen(sum(one.size for one in seen), max(one.mtime_ns for one in seen)))


def _seen(path: Path) -> Seen:
    status = path.stat()
    return Seen(status.st_size, status.st_mtime_ns)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _add_file(tar: tarfile.TarFile, name: str, path: Path, size: int) -> bool:
    """Add the first `size` bytes of a file. Returns whether it was still there; a deleted checkpoint may not be."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return False
    with file:
        if os.fstat(file.fileno()).st_size < size:
            return False  # it was written again meanwhile; the next copy has it
        entry = tarfile.TarInfo(name)
        entry.size = size
        tar.addfile(entry, file)
    return True


def _write(target: Path, name: str, content: IO[bytes]) -> None:
    """Replace a file at once. A mounted bucket, which may know no renaming, replaces files when they are closed."""
    path = target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
        _sync(part)
        try:
            part.replace(path)
        except OSError:
            shutil.copyfile(part, path)
            _sync(path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)  # a full disk needs the space


def _sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk. A mounted bucket may have no such call."""
    try:
        sync(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise


def main(arguments: list[str]) -> int:
    command, root = arguments[0], Path(arguments[1]).expanduser()
    if command == "pack":
        has = read_list(sys.stdin.buffer.read() or b"{}")
        pack(root, has, sys.stdout.buffer)
    elif command == "restore":
        unpack(sys.stdin.buffer, root, is_copy=False)
    elif command in ("copy", "bring"):
        copy(root, Path(arguments[2]).expanduser(), is_copy=command == "copy")
    else:
        raise SystemExit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
