"""Follows a file of JSON lines as it grows: each row is read once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from stat import S_ISREG

from art.viewer.conversation import Row
from art.viewer.index.files import mark, read_row


class FollowedFile(ABC):
    """A file of JSON lines that programs append to. `refresh` takes the rows that are new.

    A damaged line is skipped and counted. An incomplete last line waits until its writer has finished it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = (0, 0, 0)
        self._mark = b""
        self._begin()

    @abstractmethod
    def reset(self) -> None:
        """Forget all rows: the file was replaced or deleted."""

    @abstractmethod
    def take(self, row: Row) -> None:
        """Take a row.

        Raises:
            ValueError: it has not the form of a row of this file; it then counts as damaged.
        """

    def refresh(self) -> None:
        """Take new rows. A file that was replaced is read from its beginning; a missing one and a link have no rows.

        A link may lead to a private file, which an export would publish.
        """
        try:
            stat = self._path.lstat()
        except OSError:
            self._begin()
            return
        if not S_ISREG(stat.st_mode):
            self._begin()
            return
        seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if seen == self._seen:
            return
        if stat.st_size < self._offset or mark(self._path, self._offset) != self._mark:
            self._begin()
        self._read()
        self._mark = mark(self._path, self._offset)
        self._seen = seen

    def _begin(self) -> None:
        self.num_damaged = 0
        self._offset = 0
        self._mark = mark(self._path, 0)
        self._seen = (0, 0, 0)
        self.reset()

    def _read(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                row = read_row(line)
                if row is None and not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if row is not None:
                    try:
                        self.take(row)
                    except ValueError:
                        self.num_damaged += 1
                elif line.strip():
                    self.num_damaged += 1
