"""How far one sink has read the log: a file of JSON lines beside it. The last line of each file of the log counts.

    {"file": "history.jsonl", "offset": 0, "count": 0}
    {"file": "trajectories/train/0001.jsonl", "offset": 48213, "count": 4}
    {"file": "history.jsonl", "offset": 913, "count": 1}

A line is added after each delivery that the tracker has accepted, so a killed run continues where it was.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from art.storage.atomic import write_file
from art.storage.jsonl import append_lines, encode, read_lines


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a file of the log."""

    offset: int = 0
    """Bytes of the file that were delivered, always whole lines."""
    count: int = 0
    """Number of its rows (groups, artefacts) that the tracker has. For the history it may include rows of an earlier
    log of the same run."""


class Cursor:
    """Positions of one sink in the files of the log, by their path relative to the model's folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved = [
            (str(row["file"]), Position(int(row["offset"]), int(row["count"])))
            for _, row in read_lines(path)
            if row is not None
        ]
        self._positions = dict(self._saved)

    def get(self, file: str) -> Position | None:
        """Return the position in a file; `None` if nothing was read of it."""
        return self._positions.get(file)

    def set(self, file: str, position: Position) -> None:
        """Save a position durably."""
        append_lines(self._path, [{"file": file, **asdict(position)}])
        self._positions[file] = position

    def rewind(self, file: str, position: Position) -> None:
        """Return to the time when `file` was at `position`: what was read of other files since is read again.

        If that time is not known, all other files are read again from their beginning.
        """
        known = self._saved.index((file, position)) + 1 if (file, position) in self._saved else 0
        self._positions = dict(self._saved[:known]) | {file: position}

    def tidy(self, last: str) -> None:
        """Rewrite the file with one line for each file of the log, that of `last` at the end; forget earlier positions.

        A later `rewind` of `last` to its position then keeps those of the others.
        """
        files = sorted(self._positions, key=lambda file: file == last)
        lines = (encode({"file": file, **asdict(self._positions[file])}) + "\n" for file in files)
        write_file(self._path, "".join(lines).encode())
        self._saved.clear()
