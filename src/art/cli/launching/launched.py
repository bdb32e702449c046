"""Records of the servers that `art launch` has started: one file each in `~/.art/launched`, and the key in another.

    NAME.json        where the server is and how it is reached; no secret
    NAME.key         its API key; both files are readable for their owner only

The variable ART_LAUNCHED_DIR names another folder.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art.errors import ConfigError, NotFoundError, StorageError
from art.storage.atomic import storage_errors, temporary_name

FOLDER_VARIABLE = "ART_LAUNCHED_DIR"


class LaunchRecord(BaseModel):
    """One server that was launched."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Name by which `art launch` finds it."""
    kind: Literal["ssh", "skypilot"] = "ssh"
    """Whether its machine existed, or is rented by SkyPilot."""
    host: str
    ssh_config: str | None = None
    folder: str
    """Folder of the server on its machine."""
    local_port: int
    """Port of this machine for the tunnel, so that the address of the server here stays the same."""
    launched_at: float = Field(default_factory=time.time)
    """Seconds since 1970."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of `SkyConfig` for a rented machine."""
    server_config: dict[str, Any] | None = None
    """Settings of the server of a rented machine, which may have to be launched again."""

    @property
    def url(self) -> str:
        """Address of the server on this machine while a tunnel is open."""
        return f"http://127.0.0.1:{self.local_port}"


class Launched:
    """The records of one user."""

    def __init__(self, folder: Path | None = None) -> None:
        """
        Args:
            folder: by default that of ART_LAUNCHED_DIR, or `~/.art/launched`.

        Raises:
            ConfigError: there is no home directory, and no folder is named.
        """
        named = os.environ.get(FOLDER_VARIABLE)
        try:
            self.folder = folder or Path(named or "~/.art/launched").expanduser()
        except RuntimeError as error:
            raise ConfigError(
                f"this user has no home directory for the records of launched servers; name a folder in "
                f"{FOLDER_VARIABLE}, or set HOME"
            ) from error

    def key_path(self, name: str) -> Path:
        """Path of the file with the API key of a server."""
        return self.folder / f"{_checked(name)}.key"

    def save(self, record: LaunchRecord, api_key: str) -> None:
        """Write a record and its key, in the place of earlier ones of this name.

        Raises:
            StorageError: they cannot be written.
        """
        with storage_errors(self.folder, "making"):
            for folder in (*reversed(self.folder.parents), self.folder):
                if not folder.exists():
                    folder.mkdir(exist_ok=True, mode=0o700)
        _write_private(self.key_path(record.name), api_key)
        _write_private(self._path(record.name), record.model_dump_json(indent=2) + "\n")

    def find(self, name: str | None = None) -> LaunchRecord:
        """Return the record of a name. Without a name there must be exactly one record.

        Raises:
            NotFoundError: there is no such record, or no record at all.
            ConfigError: no name is given, and there are several records.
            StorageError: the record cannot be read.
        """
        if name is None:
            names = self.names()
            if len(names) > 1:
                raise ConfigError(f"several servers are launched; name one of them: {', '.join(names)}")
            if not names:
                raise NotFoundError(f"{self.folder} has no record of a server; start one with `art launch`")
            name = names[0]
        path = self._path(name)
        with storage_errors(path, "reading"):
            content = path.read_bytes() if path.exists() else None
        if content is None:
            there = ", ".join(self.names()) or "none"
            raise NotFoundError(f"no server {name!r} is launched; in {self.folder} there are: {there}")
        try:
            return LaunchRecord.model_validate_json(content)
        except ValidationError as error:
            raise StorageError(f"{path} is damaged or of another version of ART: {error}") from error

    def names(self) -> list[str]:
        """The names of all records, in alphabetical order."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def forget(self, name: str) -> None:
        """Delete a record and its key, if they exist.

        Raises:
            StorageError: they cannot be deleted.
        """
        for path in (self._path(name), self.key_path(name)):
            with storage_errors(path, "deleting"):
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{_checked(name)}.json"


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        raise ConfigError(f"a server's name has letters, digits, - and _ only, got {name!r}", param="name")
    return name


def _write_private(path: Path, content: str) -> None:
    """Replace a file at once; it is never readable for others."""
    temporary = temporary_name(path)
    with storage_errors(path, "writing"):
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
