"""Weights & Biases: metrics over `training_step`.

Each row of the log has its number as wandb's own `_step`, so wandb drops a row that it has already. An offline run
that was killed has lost what wandb had not written yet, up to 32 KiB, so its `.wandb` file alone knows which rows it
has. The format is LevelDB's log: blocks of 32 KiB, divided into chunks of `crc32, length, kind` and data. A record is
one chunk or several.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from art.errors import ConfigError
from art.sinks import Row, Run, Sink

AXIS = "training_step"
_BLOCK = 32_768
_HEADER = struct.Struct("<IHB")
_FILE_HEADER = 7
_FIRST_ROW = "art-first-row.txt"
_FULL, _FIRST, _LAST = 1, 2, 4


class WandbSink(Sink):
    """Reports to W&B as wandb's variables say: `WANDB_API_KEY`, `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_MODE`."""

    name = "wandb"
    package, extra = "wandb", "wandb"
    environment = ("WANDB_API_KEY",)
    switched_off_by = (("WANDB_MODE", "disabled"), ("WANDB_DISABLED", "true"))

    def __init__(self) -> None:
        self._run: Any = None
        self._has_rows = False

    def start(self, run: Run) -> int | None:
        import wandb

        mode = wandb.setup().settings.mode  # of WANDB_MODE, or of `wandb offline`
        if mode == "disabled":
            raise ConfigError("W&B is disabled by WANDB_MODE: unset it, or leave 'wandb' out of `report_metrics`")
        offline = mode in ("offline", "dryrun")
        try:
            has_key = offline or wandb.run is not None or wandb.login(prompt=False)
        except (wandb.Error, ValueError) as error:
            raise ConfigError(f"W&B did not accept the key: {error}. Check WANDB_API_KEY and WANDB_BASE_URL") from error
        if not has_key:
            raise ConfigError(
                "W&B needs a key: set WANDB_API_KEY, or run `wandb login`, or set WANDB_MODE=offline to keep its "
                "files on this machine"
            )
        folder = Path(os.environ.get("WANDB_DIR") or run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        num_rows = count_rows(folder / "wandb", run.id)  # before this process has a file of its own
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or run.project, id=run.id, name=run.name, resume="allow",
                reinit="create_new", dir=folder, config=dict(run.config),
                # What the program prints may hold anything, so it is not uploaded.
                settings=wandb.Settings(console="off"),
            )  # fmt: skip
        except wandb.Error as error:
            raise ConfigError(
                f"W&B did not start the run {run.project}/{run.name}: {error}. Check WANDB_API_KEY, WANDB_BASE_URL and "
                "WANDB_ENTITY, set WANDB_MODE=offline, or leave 'wandb' out of `report_metrics`"
            ) from error
        self._run.define_metric(AXIS)
        self._run.define_metric("*", step_metric=AXIS)
        return num_rows if offline else int(self._run.starting_step)

    def configure(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def metrics(self, row: Row) -> None:
        if self._run.offline and not self._has_rows:
            # With which row an offline run began, for `count_rows`.
            (Path(self._run.dir).parent / _FIRST_ROW).write_text(str(row.number), encoding="utf-8")
        self._has_rows = True
        from wandb import Histogram

        scalars, histograms = row.split_histograms()
        shown = {name: Histogram(np_histogram=(one.counts, one.edges)) for name, one in histograms.items()}
        data = {**scalars, **shown, AXIS: row.step, "_timestamp": row.recorded_at.timestamp()}
        self._run.log(data, step=row.number, commit=True)

    def close(self, timeout_s: float) -> None:
        self._run.finish()


def records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the complete records of a file, each a serialised `wandb_internal_pb2.Record`, and where it ends."""
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

    for data, _ in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}


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
        end = max((end for _, end in records(data)), default=0)
        if end == 0:
            shutil.rmtree(path.parent)
            continue
        if end < len(data):
            os.truncate(path, end)
        counts += [int(row["_step"]) + 1 for row in history_rows(path) if "_step" in row]
    return max(counts, default=None)
