"""Lines of the journal. Each says which write it belongs to and carries a checksum, so that no damage goes unnoticed.

    {"batch": 3, "of": 2, "crc": "5f1d09b2", "event": "rollout_ended", "group": 12, "index": 0, "trajectory": {...}}

Lines that wait together are written and fsynced as one batch. A batch begins only after the one before it is on disk.
So a bad line in the last batch was never reported as written: the machine stopped while it was written. A bad line
before that is damage.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.errors import StorageError
from art.storage.atomic import storage_errors

logger = logging.getLogger(__name__)

_LINE = re.compile(rb'\{"batch": (\d+), "of": (\d+), "crc": "([0-9a-f]{8})", ([^\n]*)\n?')


@dataclass(frozen=True, slots=True)
class Span:
    """Where the content of a line lies in the file: everything after its checksum."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Line:
    """A line that was read."""

    record: dict[str, Any]
    span: Span


def frame_line(content: bytes, *, batch: int, of: int, offset: int) -> tuple[bytes, Span]:
    """Make a line of the file.

    Args:
        content: the JSON object of the record without its first character, as a `Span` names it in a file.
        batch: number of the write that the line belongs to; 0 for those that were renamed into place.
        of: number of lines in that write.
        offset: where in the file the line will begin.
    """
    head = b'{"batch": %d, "of": %d, "crc": "%08x", ' % (batch, of, zlib.crc32(content))
    return head + content + b"\n", Span(offset + len(head), len(content))


def read_journal(path: Path) -> Iterator[Line]:
    """Yield the lines of a journal up to where a write was not finished.

    Raises:
        StorageError: a line was damaged after it was written.
    """
    batch, left, num_bad, offset = -1, 0, 0, 0
    bad: tuple[int, int] | None = None  # number of the first bad line, and its batch
    with storage_errors(path, "reading"), path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            parts, offset = _LINE.fullmatch(text), offset + len(text)
            left -= 1
            if parts is None or f"{zlib.crc32(parts[4]):08x}".encode() != parts[3]:
                num_bad += 1
                bad = bad or (number, batch if left >= 0 else batch + 1)
                if bad[1] == 0:
                    raise _damage(path, number)
                continue
            if bad is not None and int(parts[1]) != bad[1]:
                raise _damage(path, bad[0])
            if bad is None and int(parts[1]) != batch:
                batch, left = int(parts[1]), int(parts[2]) - 1
            if bad is None:
                span = Span(offset - len(text) + parts.start(4), len(parts[4]))
                yield Line(json.loads(b"{" + parts[4]), span)
    if num_bad:
        logger.warning("%s: the last write was interrupted, and %d of its lines are not whole", path, num_bad)


def _damage(path: Path, number: int) -> StorageError:
    return StorageError(
        f"line {number} of {path} is damaged, so it is not known which rollouts were under way. Restore the file from "
        f"a copy; or delete the folder {path.parent} to begin without them: checkpoints and log stay as they are"
    )
