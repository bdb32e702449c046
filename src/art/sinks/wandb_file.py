"""Reads and mends the `.wandb` files of offline runs: how many rows they hold.

A run that was killed has lost what wandb had not written yet, up to 32 KiB, so the file alone knows which rows it has.
The format is LevelDB's log: blocks of 32 KiB, divided into chunks of `crc32, length, kind` and data. A record is one
chunk or several.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 32_768
_HEADER = struct.Struct("<IHB")
_FILE_HEADER = 7
_FIRST_ROW = "art-first-row.txt"
_FULL, _FIRST, _LAST = 1, 2, 4


def records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a file's content, each a serialised `wandb_internal_pb2.Record`."""
    return (record for record, _ in _records_with_ends(data))


def _records_with_ends(data: bytes) -> Iterator[tuple[bytes, int]]:
    position, record = _FILE_HEADER, b""
    while True:
        left = _BLOCK - position % _BLOCK
        if left < _HEADER.size:  # the rest of a block is filling
            position += left
        if position + _HEADER.size > len(data):
            return
        _, length, kind = _HEADER.unpack_from(data, position)
        position += _HEADER.size
        chunk = data[position : position + length]
        if len(chunk) < length or kind == 0:
            return
        position += length
        record = chunk if kind in (_FULL, _FIRST) else record + chunk
        if kind in (_FULL, _LAST):
            yield record, position


def history_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of the history in a `.wandb` file: JSON texts by the names of metrics, `_step` among them."""
    from wandb.proto import wandb_internal_pb2

    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}


def note_first_row(run_folder: Path, number: int) -> None:
    """Note with which row an offline run began, for `count_rows`."""
    (run_folder / _FIRST_ROW).write_text(str(number), encoding="utf-8")


def count_rows(folder: Path, run_id: str) -> int | None:
    """Return the number of rows that W&B gets from the offline runs of `run_id` in wandb's folder.

    `None` if there are none: none was made, or all were uploaded and deleted. Runs that were killed are mended, because
    `wandb sync` stops at an incomplete record: it is cut off, and a run without any record is deleted.
    """
    counts = []
    for path in sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")):
        first = path.parent / _FIRST_ROW
        counts += [int(first.read_text(encoding="utf-8"))] if first.exists() else []
        data = path.read_bytes()
        end = max((end for _, end in _records_with_ends(data)), default=0)
        if end == 0:
            shutil.rmtree(path.parent)
            continue
        if end < len(data):
            os.truncate(path, end)
        counts += [int(row["_step"]) + 1 for row in history_rows(path) if "_step" in row]
    return max(counts, default=None)
