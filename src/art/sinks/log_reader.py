"""The deliveries that a sink has not had yet, in the order in which they were logged, and how far it has read.

`model.log` writes groups first and then their row, so the row tells at which step to look for groups: before a row is
delivered, all new groups of its step are.

The cursor of a sink is a file of JSON lines beside the log. The last line of each file of the log counts:

    {"file": "history.jsonl", "offset": 0, "count": 0}
    {"file": "trajectories/train/0001.jsonl", "offset": 48213, "count": 4}
    {"file": "history.jsonl", "offset": 913, "count": 1}

A line is added after each delivery that the tracker has accepted, so a killed run continues where it was.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from art.sinks.sink import Artefact, LoggedGroups, Row, Sink
from art.storage.atomic import write_file
from art.storage.jsonl import append_lines, encode, read_lines, read_lines_from
from art.storage.layout import ModelPaths
from art.storage.trajectories import parse_group
from art.trajectory import TrajectoryGroup

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 * 2**20
"""Groups are delivered in pieces of about this size, so that a large log does not fill the memory."""
_NO_METRICS = frozenset({"step", "training_step", "recorded_at"})


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


@dataclass(frozen=True, slots=True)
class Delivery:
    """One call of a sink, and where the cursor is afterwards."""

    content: Row | LoggedGroups | Artefact | None
    """`None`: there is nothing to send, because a line is damaged or the sink does not take it."""
    file: str
    after: Position
    num_damaged: int = 0
    """Lines that are lost for this sink because they are damaged."""


class LogReader:
    """Reads the log of one model for one sink."""

    def __init__(self, paths: ModelPaths, sink: Sink) -> None:
        self._paths, self._sink = paths, sink
        self._cursor = Cursor(paths.sinks / f"{sink.name}.jsonl")
        self._history = paths.history.name
        self._artefacts = paths.artefacts.relative_to(paths.root).as_posix()

    def align(self, num_rows: int | None) -> None:
        """Settle from which row to continue. `num_rows` is the number of rows that the tracker has; `None`: unknown.

        The cursor gives way to the tracker: a run that was killed between an accepted row and its cursor does not
        send the row again, and rows that the tracker has lost since are sent again.
        """
        place, size = self._cursor.get(self._history), _size(self._paths.history)
        if place is None or place.offset > size:  # the first time, or the log was removed and began again
            known = 0 if place is None else place.count
            if num_rows:
                logger.info(
                    "%s has %d rows of this run from an earlier log, and continues it", self._sink.name, num_rows
                )
            self._cursor.rewind(self._history, Position(0, known if num_rows is None else num_rows))
        elif num_rows is not None and num_rows < place.count:
            self._cursor.rewind(self._history, self._position_of(num_rows, place))
        elif num_rows is not None and num_rows > place.count:
            self._cursor.set(self._history, self._position_of(num_rows, place))
        elif self._sink.holds_groups:
            self._cursor.rewind(self._history, place)  # groups that waited for a row which did not come
        self._cursor.tidy(self._history)

    def _position_of(self, num_rows: int, place: Position) -> Position:
        """Position in the history after which the tracker has `num_rows` rows of the run."""
        ends = [end for row, end in read_lines_from(self._paths.history, 0) if row is not None]
        earlier = place.count - sum(end <= place.offset for end in ends)  # rows from a log before this one
        of_log = min(max(num_rows - earlier, 0), len(ends))
        return Position(ends[of_log - 1] if of_log else 0, num_rows)

    def pending(self) -> Iterator[Delivery]:
        """Yield what to deliver next, until the end of the log. Call `done` for each before taking the next.

        Artefacts come last, so that large files do not hold up metrics.
        """
        place = self._cursor.get(self._history) or Position()
        for row, end in read_lines_from(self._paths.history, place.offset):
            if row is None:
                yield Delivery(None, self._history, Position(end, place.count), num_damaged=1)
                continue
            if self._sink.takes_groups:
                yield from self._pending_groups(_step_of(row))
            place = Position(end, place.count + 1)
            yield Delivery(_as_row(row, place.count - 1), self._history, place)
        yield from self._pending_artefacts()

    def done(self, delivery: Delivery) -> None:
        """Move the cursor past a delivery."""
        self._cursor.set(delivery.file, delivery.after)

    def num_pending_rows(self) -> int:
        """Count the rows of the history that were not delivered."""
        place = self._cursor.get(self._history) or Position()
        return sum(1 for _ in read_lines_from(self._paths.history, place.offset))

    def _pending_groups(self, step: int) -> Iterator[Delivery]:
        for folder in sorted(self._paths.all_trajectories.glob("*/")):
            path = self._paths.trajectories(folder.name, step)
            file = path.relative_to(self._paths.root).as_posix()
            place = self._cursor.get(file) or Position()
            if _size(path) > place.offset:
                yield from self._pieces(path, file, folder.name, step)

    def _pieces(self, path: Path, file: str, split: str, step: int) -> Iterator[Delivery]:
        place = self._cursor.get(file) or Position()
        groups: list[TrajectoryGroup] = []
        first, start, num_damaged = place.count, place.offset, 0
        lines = itertools.chain(read_lines_from(path, place.offset), [(None, -1)])
        for line, end in lines:
            is_last = end < 0
            if not is_last:
                group = None if line is None else _as_group(line, path)
                num_damaged += group is None
                groups += [] if group is None else [group]
                place = Position(end, place.count + 1)
            if (is_last and place.offset > start) or place.offset - start >= PIECE_BYTES:
                content = LoggedGroups(split=split, step=step, first=first, groups=groups) if groups else None
                yield Delivery(content, file, place, num_damaged)
                groups, first, start, num_damaged = [], place.count, place.offset, 0

    def _pending_artefacts(self) -> Iterator[Delivery]:
        place = self._cursor.get(self._artefacts) or Position()
        for row, end in read_lines_from(self._paths.artefacts, place.offset):
            content = None
            if row is not None and self._sink.takes_artefacts:
                content = Artefact(number=place.count, **{**row, "path": Path(row["path"])})
            place = Position(end, place.count + 1)
            yield Delivery(content, self._artefacts, place, num_damaged=int(row is None))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _step_of(row: dict[str, Any]) -> int:
    return int(row.get("step", row.get("training_step", 0)))


def _as_row(row: dict[str, Any], number: int) -> Row:
    metrics = {
        key: value
        for key, value in row.items()
        if key not in _NO_METRICS and isinstance(value, (int, float)) and not isinstance(value, bool)
        if math.isfinite(value)
    }
    when = row.get("recorded_at")
    recorded_at = datetime.fromisoformat(when).astimezone(UTC) if isinstance(when, str) else datetime.now(UTC)
    return Row(number=number, step=_step_of(row), recorded_at=recorded_at, metrics=metrics)


def _as_group(line: dict[str, Any], path: Path) -> TrajectoryGroup | None:
    try:
        return parse_group(line)
    except (ValueError, TypeError, AttributeError) as error:  # `ValidationError` is a `ValueError`
        logger.warning("a line of %s is not a trajectory group, so sinks do not get it: %s", path, error)
        return None
