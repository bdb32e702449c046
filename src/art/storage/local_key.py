"""The key that a server on loopback has made for itself, left where clients of the same user find it.

    ~/.local/state/art/server-5000.key        readable by its owner alone; gone when the server ends

So `art-server` in one terminal and a script in another need no key to be copied. A server with a key of its own
(`ART_API_KEY`) leaves none: whoever chose that key hands it on.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@contextlib.contextmanager
def left_for_clients(port: int, key: str) -> Iterator[None]:
    """For the time of the body. Where there is no home to write to, nothing is left."""
    path = _path(port)
    try:
        _write_private(path, key)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        if _read(path) == key:  # the file of another server that has taken the port stays
            path.unlink(missing_ok=True)


def find_local_key(base_url: str) -> str | None:
    """The key of the server at a loopback address, `None` elsewhere and where there is none that can be trusted."""
    url = urlsplit(base_url)
    if url.hostname not in LOOPBACK or url.port is None:
        return None
    return _read(_path(url.port))


def _path(port: int) -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "art" / f"server-{port}.key"


def _write_private(path: Path, key: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a server that was killed
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)


def _read(path: Path) -> str | None:
    """A file that others could have written or read is as good as none."""
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            if hasattr(os, "getuid") and (status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077):
                return None
            return file.read().strip() or None
    except OSError:
        return None
