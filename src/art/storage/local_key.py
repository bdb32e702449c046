"""Share the key of a server on loopback with clients of the same user, through a file.

    ~/.local/state/art/server-5000.key        readable only by its owner; deleted when the server ends

So `art-server` in one terminal and a script in another work without copying a key. A server that was started with
`ART_API_KEY` writes no such file, since its user knows the key.
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
    """Share the API key of the server on `port` with its user's clients while the body runs.

    If the home directory cannot be written, the key is not shared.
    """
    try:
        path = _path(port)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # left by a server that was killed
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(key)
    except (OSError, RuntimeError):  # a user whom the system does not know has no home directory
        yield
        return
    try:
        yield
    finally:
        if _read(path) == key:  # do not delete the file of another server that uses the port now
            path.unlink(missing_ok=True)


def find_local_key(base_url: str) -> str | None:
    """Return the shared key of the server at a loopback URL. `None` if there is none, or if it cannot be trusted."""
    url = urlsplit(base_url)
    if url.hostname not in LOOPBACK or url.port is None:
        return None
    try:
        return _read(_path(url.port))
    except RuntimeError:  # there is no home directory
        return None


def state_folder() -> Path:
    """Return the folder of files that ART's programs of one user share: `~/.local/state/art`, or in XDG_STATE_HOME."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "art"


def _path(port: int) -> Path:
    return state_folder() / f"server-{port}.key"


def _read(path: Path) -> str | None:
    """Read a key file. A file that other users could have read or written counts as missing."""
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if hasattr(os, "getuid") and (status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077):
                return None
            return file.read().strip() or None
    except OSError:
        return None
