"""Files of the first machine, for the processes of a team on the other machines.

    first process                     first process of each other machine
    what is at the path: names,  -->  are the same files at this path here, since the machines share a file system?
    sizes, times                        yes: all processes here read those
                                        no: take a folder for received files (`received.py`), and say what it lacks
    files that a machine lacks   -->  write them there, for all processes here

So the machines need no common file system, and where they have one nothing is sent. Outside of the folder for received
files nothing is written or deleted, so files that some of the machines share are safe.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from art.config.nodes import RECEIVED_VARIABLE
from art.errors import ConfigError, DiskFullError, StorageError
from art.storage.atomic import storage_errors
from art.trainer.machine.distributed import Team
from art.trainer.machine.received import Received
from art.trainer.machine.transfer import PIECE_BYTES, SentFile, transfer

_log = logging.getLogger(__name__)

_UNREAD_WEIGHTS = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"}
"""Endings of weights that the trainer does not read. Many folders have them beside those that it does."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """A file of the first machine, or a folder with its files."""

    path: Path
    is_folder: bool
    files: tuple[SentFile, ...]
    host: str

    @property
    def folder(self) -> Path:
        return self.path if self.is_folder else self.path.parent

    def within(self, folder: Path) -> Path:
        """Return where a copy is that has its files in `folder`."""
        return folder if self.is_folder else folder / self.path.name


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the first process of a machine says about a listing."""

    path: Path
    """Where the processes of that machine read."""
    lacks: frozenset[str] = frozenset()
    """Files that must be sent."""
    doubts: frozenset[str] = frozenset()
    """Files that have the right size there, but were changed at another time. Their content decides."""


@contextlib.contextmanager
def read_everywhere(team: Team, path: Path) -> Iterator[Path]:
    """Yield where this process can read what the first one has at `path`, a file or folder. Use it in `Team.call`.

    A copy is deleted once all processes have left the block. If the block fails, the next process of the machine that
    receives something deletes it.

    Raises:
        ConfigError: this machine cannot make a folder for the files.
        DiskFullError, StorageError: files cannot be read or written.
    """
    if team.machines is None:
        yield path
        return
    places, copy = _bring(team, functools.partial(_list_path, path), lambda _: "call")
    try:
        yield places[team.machine]
        if any(place != path for place in places):
            team.gather(None)
    except BaseException:
        if copy is not None:
            copy.release()
        raise
    if copy is not None:
        copy.delete()


def copy_model(team: Team, name: str) -> str | None:
    """Return the folder of a copy of the base model `name`, if this machine needs one. Use it in `Team.call`.

    It does not need one of a hub id, since each machine has a cache of the hub. A folder is copied without subfolders
    and without weights that the trainer does not read. The copy stays when the process ends, and is deleted when the
    machine receives something else while no process uses it.

    Raises:
        ConfigError: this machine cannot make a folder for the files.
        DiskFullError, StorageError: files cannot be read or written.
    """
    if team.machines is None or not team.gather(Path(name).is_dir())[0]:
        return None
    places, copy = _bring(team, functools.partial(_list_path, Path(name), is_model=True), _model_copy)
    if copy is not None:
        _copies_of_models.append(copy)
    return None if team.machine == 0 else str(places[team.machine])


_copies_of_models: list[Received] = []
"""Locked until the process ends."""


def _model_copy(listing: _Listing) -> str:
    digest = hashlib.sha256(f"{listing.host}:{listing.path}".encode()).hexdigest()
    return f"{listing.path.name}-{digest[:16]}"


def _bring(
    team: Team, make_listing: Callable[[], _Listing], copy_name: Callable[[_Listing], str]
) -> tuple[list[Path], Received | None]:
    """Give each machine the files of the listing that the first process makes.

    Returns:
        where each machine reads them, and the copy, if this process has made one for its machine.
    """
    listing = team.gather(make_listing() if team.rank == 0 else None)[0]
    assert listing is not None  # if the first process fails, so does the line above
    receiver = _Receiver(team, listing, copy_name(listing)) if team.leads and team.rank > 0 else None
    try:
        answers = team.gather(receiver.answer() if receiver else _Answer(listing.path))
        if doubts := frozenset[str]().union(*(answer.doubts for answer in answers)):
            digests = team.gather(_digest(listing.folder, doubts) if team.rank == 0 else None)[0]
            answers = team.gather(receiver.answer(digests) if receiver else _Answer(listing.path))
        if lacking := frozenset[str]().union(*(answer.lacks for answer in answers)):
            _send(team, listing, lacking, receiver)
    except BaseException:
        if receiver is not None and receiver.copy is not None:
            receiver.copy.release()
        raise
    return [answer.path for answer in answers[:: team.local_size]], None if receiver is None else receiver.copy


def _send(team: Team, listing: _Listing, names: Collection[str], receiver: _Receiver | None) -> None:
    started = time.perf_counter()
    files = [file for file in listing.files if file.name in names]
    if team.leads:
        with _naming_machine(team):
            transfer(team, files, receiver.folder_for if receiver else lambda _: listing.folder)
    team.gather(None)  # a process that failed tells the others here
    size, seconds = sum(file.size for file in files), time.perf_counter() - started
    if team.rank == 0 and size > PIECE_BYTES:
        _log.info("sent %s to other machines: %.3f GB in %.1f s", listing.path, size / 1e9, seconds)


class _Receiver:
    """Finds out what this machine lacks, and takes a folder for it."""

    def __init__(self, team: Team, listing: _Listing, copy_name: str) -> None:
        self.copy: Received | None = None
        self._team = team
        self._listing = listing
        self._copy_name = copy_name
        self._lacks: frozenset[str] = frozenset()

    def answer(self, digests: Mapping[str, str] | None = None) -> _Answer:
        """Compare this machine with the listing. `digests` has the content of files of which the time differs."""
        missing, touched = _differing(self._listing, self._listing.folder)
        if digests is not None and not missing:
            with _naming_machine(self._team):
                here = _digest(self._listing.folder, touched)
            missing, touched = {name for name in touched if here[name] != digests.get(name)}, set()
        if not missing:
            return _Answer(self._listing.path, doubts=frozenset(touched))
        if self.copy is None:
            self._take_copy()
        assert self.copy is not None
        return _Answer(self._listing.within(self.copy.folder), lacks=self._lacks)

    def folder_for(self, file: SentFile) -> Path | None:
        """Return where to write a file that is sent; `None` if only other machines lack it."""
        return self.copy.folder if self.copy is not None and file.name in self._lacks else None

    def _take_copy(self) -> None:
        try:
            self.copy = Received(self._copy_name)
        except StorageError as error:
            raise ConfigError(
                f"process {self._team.rank} of the trainer, on {socket.gethostname()}, does not see "
                f"{self._listing.path} and has no folder to receive it: {error.message}. Set `received` of this "
                f"machine in `NodesConfig.others` (or {RECEIVED_VARIABLE} there) to a folder that it can write, or "
                "share the data directory and the base model at the same path",
                param="nodes",
            ) from error
        folder, names = self.copy.folder, {file.name for file in self._listing.files}
        with _naming_machine(self._team), storage_errors(folder, "clearing"):
            for stray in [entry for entry in folder.iterdir() if entry.name not in names]:
                stray.unlink()
            self._lacks = frozenset().union(*_differing(self._listing, folder))
            size, free = (
                sum(f.size for f in self._listing.files if f.name in self._lacks),
                shutil.disk_usage(folder).free,
            )
        if size > free:
            raise DiskFullError(
                f"process {self._team.rank} of the trainer, on {socket.gethostname()}, has {free / 1e9:.1f} GB free in "
                f"{folder}, but {self._listing.path} needs {size / 1e9:.1f} GB there: free space, or set `received` of "
                "this machine in `NodesConfig.others` to a folder on a larger disk"
            )


@contextlib.contextmanager
def _naming_machine(team: Team) -> Iterator[None]:
    """Say in a storage error where it happened."""
    try:
        yield
    except StorageError as error:
        where = f"in process {team.rank} of the trainer, on {socket.gethostname()}"
        raise type(error)(f"{where}: {error.message}") from error


def _list_path(path: Path, *, is_model: bool = False) -> _Listing:
    with storage_errors(path, "reading"):
        is_folder = path.is_dir()
        entries = sorted(path.iterdir()) if is_folder else [path]
        if is_folder:
            entries = [entry for entry in entries if entry.is_file() and not entry.name.startswith(".")]
        if is_model:
            entries = [entry for entry in entries if entry.suffix not in _UNREAD_WEIGHTS]
        stats = [entry.stat() for entry in entries]
    files = [SentFile(e.name, stat.st_size, stat.st_mtime_ns) for e, stat in zip(entries, stats, strict=True)]
    return _Listing(path, is_folder, tuple(files), socket.gethostname())


def _differing(listing: _Listing, folder: Path) -> tuple[set[str], set[str]]:
    """Return the files that `folder` does not have in their size, and those whose time is another one."""
    missing, touched = set[str](), set[str]()
    for file in listing.files:
        try:
            stat = (folder / file.name).stat()
        except OSError:
            missing.add(file.name)
            continue
        if stat.st_size != file.size or not os.access(folder / file.name, os.R_OK):
            missing.add(file.name)
        elif stat.st_mtime_ns != file.mtime_ns:
            touched.add(file.name)
    return missing, touched


def _digest(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return the sha256 of files in a folder, by name."""
    digests = {}
    for name in names:
        with storage_errors(folder / name, "reading"), (folder / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
