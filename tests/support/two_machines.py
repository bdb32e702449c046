"""Processes that count as machines. Each machine has a folder of its own, so they share no relative path.

Absolute paths are the same for both, like a file system that they share.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from art.config.nodes import RECEIVED_VARIABLE
from art.errors import StorageError
from art.storage.atomic import storage_errors
from art.trainer.machine import machine_files, transfer
from art.trainer.machine.distributed import Team
from art.trainer.machine.machine_files import copy_model, read_everywhere
from tests.support.trainer_pair import Member, Pair, pair_of_processes


@contextlib.contextmanager
def two_machines(folder: Path, places: Sequence[int] = (0, 1), *, local_size: int = 1) -> Iterator[Pair]:
    """Process k works in the folder of place `places[k]`, `folder`/<place>, and receives files in the one beside it.

    Each `local_size` processes are a machine. Machines at one place share their relative paths too.
    """
    environments = [{RECEIVED_VARIABLE: str(folder / f"received-{place}")} for place in places]
    for place in places:
        (folder / str(place)).mkdir(exist_ok=True)
    with pair_of_processes(environments, local_size=local_size) as pair:
        pair.run(_work_in, [str(folder / str(place)) for place in places])
        yield pair


def _work_in(member: Member, folders: list[str]) -> None:
    os.chdir(folders[member.team.rank])


def read(member: Member, path: Path) -> tuple[str, dict[str, tuple[int, bytes]]]:
    """Where this process reads `path`, and what it finds there: time and content by name."""
    with member.team.call(), read_everywhere(member.team, path) as own:
        entries = sorted(own.iterdir()) if own.is_dir() else [own]
        return str(own), {entry.name: (entry.stat().st_mtime_ns, entry.read_bytes()) for entry in entries}


def fail_within(member: Member, path: Path) -> None:
    """Fail on machine 1 while it reads."""
    with member.team.call(), read_everywhere(member.team, path):
        if member.team.rank == 1:
            raise StorageError("the disk of machine 1 is broken")


def copy(member: Member, name: str) -> str | None:
    with member.team.call():
        return copy_model(member.team, name)


def count_sent(member: Member, work: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """The result of `work`, and the number of bytes that machine 0 has sent for it."""
    sizes: list[int] = []
    original = transfer.transfer

    def counting(team: Team, sent: list[transfer.SentFile], *rest: Any) -> None:
        sizes.extend(file.size for file in sent if team.rank == 0)
        original(team, sent, *rest)

    with mock.patch.object(machine_files, "transfer", counting):
        return work(member, *args, **kwargs), sum(sizes)


def with_free_bytes(member: Member, free: int, path: Path) -> Any:
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=free)):
        return read(member, path)


def with_smaller_file(member: Member, path: Path) -> Any:
    """Read a file that becomes smaller after machine 0 has looked at it."""
    original = transfer.transfer

    def shrink(*args: Any) -> None:
        if member.team.rank == 0:
            os.truncate(path, 3)
        original(*args)

    with mock.patch.object(machine_files, "transfer", shrink):
        return read(member, path)


def with_full_disk(member: Member, path: Path) -> Any:
    """Read files of which machine 1 can write one piece."""

    def write(path: Path, file: transfer.SentFile, pieces: Iterator[memoryview]) -> None:
        with storage_errors(path, "writing"):
            next(pieces)
            raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(transfer, "_write", write):
        return read(member, path)
