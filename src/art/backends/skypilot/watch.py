"""The job that runs on the machine for as long as its server is of use. SkyPilot stops the machine after it ends.

SkyPilot counts a machine as idle when no job of SkyPilot runs there. A server would be such a job for ever, so the job
is this program instead: it ends when nothing was asked of the server for `--idle-minutes`, or when the money is spent.

    FOLDER/watch.json      what it has seen, every few seconds: {"last_active_at", "ends_at", "ended"}; times since 1970
    FOLDER/limit.json      {"ends_at": ...}, written by the client once the price of the machine is known
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from art.backends.skypilot.copying import copy
from art.errors import ArtError
from art.protocol.job_states import UNFINISHED
from art.storage.layout import DataDir

POLL_S = 15.0


@dataclass(slots=True)
class Watch:
    """What is known about the use of one server."""

    folder: Path
    idle_s: float
    """Seconds without any use after which the job ends."""
    copy_to: Path | None = None
    copy_every_s: float = 600.0
    started_at: float = field(default_factory=time.time)
    copied_at: float = 0.0
    busy_at: float = 0.0
    """When the server was last seen to have jobs that are not finished."""

    @property
    def data(self) -> DataDir:
        return DataDir(self.folder / "data")

    def look(self, now: float) -> str | None:
        """Look at the server once.

        Args:
            now: seconds since 1970.

        Returns:
            Why the job ends now; `None` if it goes on.
        """
        if self._has_jobs():
            self.busy_at = now
        active = max(self.started_at, self.busy_at, self._last_write())
        ends_at = self._limit()
        ended = None
        if ends_at is not None and now >= ends_at:
            ended = "the budget is spent"
        elif now - active >= self.idle_s:
            ended = f"idle for {(now - active) / 60:.0f} minutes"
        seen = {"last_active_at": active, "ends_at": ends_at, "ended": ended}
        self._write(json.dumps(seen))
        return ended

    def copy_if_due(self, now: float) -> None:
        """Bring the copy in the bucket up to date if it is old."""
        if self.copy_to is None or now - self.copied_at < self.copy_every_s or not self.data.database.exists():
            return
        self.copied_at = now
        try:
            num_files = copy(self.data.root, self.copy_to)
            print(f"copied {num_files} files to {self.copy_to}", flush=True)  # noqa: T201
        except ArtError as error:
            print(f"copying to {self.copy_to} failed: {error}", flush=True)  # noqa: T201

    def _write(self, seen: str) -> None:
        part = self.folder / ".watch.json.part"
        try:
            part.write_text(seen, encoding="utf-8")
            part.replace(self.folder / "watch.json")
        except OSError as error:  # a full disk must not end the watch, and the machine with it
            print(f"writing {self.folder / 'watch.json'} failed: {error.strerror}", flush=True)  # noqa: T201

    def _has_jobs(self) -> bool:
        """Whether the server has jobs that are not finished."""
        states = ", ".join(f"'{state}'" for state in UNFINISHED)
        with contextlib.suppress(sqlite3.Error):
            path = f"file:{self.data.database}?mode=ro"
            with contextlib.closing(sqlite3.connect(path, uri=True, timeout=5.0)) as db:
                return db.execute(f"SELECT 1 FROM jobs WHERE state IN ({states}) LIMIT 1").fetchone() is not None
        return False  # no database, or one that cannot be read now

    def _last_write(self) -> float:
        """When the server last recorded anything: each answer and each change of a job is written to its database."""
        latest = 0.0
        for name in (self.data.database.name, f"{self.data.database.name}-wal"):
            with contextlib.suppress(OSError):
                latest = max(latest, (self.data.root / name).stat().st_mtime)
        return latest

    def _limit(self) -> float | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return float(json.loads((self.folder / "limit.json").read_text(encoding="utf-8"))["ends_at"])
        return None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--idle-minutes", type=float, required=True)
    parser.add_argument("--copy-to", type=Path)
    parser.add_argument("--copy-every-minutes", type=float, default=10.0)
    parser.add_argument("--poll-s", type=float, default=POLL_S)
    args = parser.parse_args(arguments)
    watch = Watch(
        args.folder.expanduser(), args.idle_minutes * 60, copy_to=args.copy_to,
        copy_every_s=args.copy_every_minutes * 60, copied_at=time.time(),
    )  # fmt: skip
    while (ended := watch.look(time.time())) is None:
        watch.copy_if_due(time.time())
        time.sleep(args.poll_s)
    print(f"{ended}: stopping the server; SkyPilot stops the machine soon", flush=True)  # noqa: T201
    subprocess.run([sys.executable, str(watch.folder / "keeper.py"), "stop"], stdin=subprocess.DEVNULL, check=False)
    watch.copied_at = 0.0
    watch.copy_if_due(time.time())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
