"""Checkpoints in an S3-compatible store, laid out as in a data directory.

    s3://<bucket>/<prefix>/<project>/models/<name>/checkpoints/<step>/<file>

The manifest is sent last, so a checkpoint with a manifest is complete. A file that the store already has with the same
hash is not sent again. boto3 finds keys and region by itself (environment, profile, role).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from art.errors import ConfigError, NotFoundError, StorageError
from art.exports.folder import OnBytes, new_folder
from art.protocol.checkpoint_calls import S3Target
from art.storage import checkpoints

_HASH = "sha256"


class S3Store:
    """Sends checkpoints and exports to an S3 bucket, below a prefix, and fetches checkpoints from there."""

    def __init__(self, target: S3Target) -> None:
        """Make the client for the bucket and prefix of `target`.

        Raises:
            ConfigError: boto3 is not installed, or finds no keys.
        """
        try:
            import boto3
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise ConfigError("S3 needs `pip install 'agent-reinforcement-trainer[s3]'` on the server") from error
        self._bucket = target.bucket
        self._prefix = target.prefix.strip("/")
        self._errors = (BotoCoreError, ClientError)
        try:
            self._client: Any = boto3.client("s3", endpoint_url=target.endpoint_url)
        except self._errors as error:
            raise ConfigError(f"cannot use s3://{target.bucket}: {error}") from error

    def push(self, folder: Path, place: str, on_bytes: OnBytes) -> str:
        """Send a checkpoint or export to `place` below the prefix, and return its address.

        Raises:
            StorageError: the store refused.
        """
        files = checkpoints.list_files(folder)
        total, done = sum(entry.size for entry in files.values()), 0
        for name, entry in files.items():
            if self._hash_of(f"{place}/{name}") != entry.sha256:
                self._put(folder / name, f"{place}/{name}", entry.sha256)
            done += entry.size
            on_bytes(done, total)
        self._put(folder / checkpoints.MANIFEST, f"{place}/{checkpoints.MANIFEST}", "")
        return f"s3://{self._bucket}/{self._key(place)}"

    def steps(self, place: str) -> list[int]:
        """List the steps with a complete checkpoint under the folder `place`, in ascending order."""
        prefix, names = self._key(place) + "/", []
        try:
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix):
                keys = [entry["Key"].removeprefix(prefix) for entry in page.get("Contents", [])]
                names += [key.split("/")[0] for key in keys if key.endswith(f"/{checkpoints.MANIFEST}")]
        except self._errors as error:
            raise StorageError(f"cannot list s3://{self._bucket}/{prefix}: {error}") from error
        return sorted(int(name) for name in names if name.isdecimal())

    def pull(self, place: str, target: Path, on_bytes: OnBytes) -> None:
        """Fetch the checkpoint at `place` into the folder `target` and verify it.

        Raises:
            NotFoundError: the store has no such checkpoint.
            StorageError: the store refused, or cannot be reached.
            CorruptCheckpointError: the files do not fit their manifest. No `target` is left.
        """
        with new_folder(target, manifest=False) as folder:
            self._get(f"{place}/{checkpoints.MANIFEST}", folder / checkpoints.MANIFEST)
            files = checkpoints.list_files(folder)
            total, done = sum(entry.size for entry in files.values()), 0
            for name, entry in files.items():
                if Path(name).name != name:
                    raise StorageError(f"the manifest at {place} names {name!r}, which is not a plain file name")
                self._get(f"{place}/{name}", folder / name)
                done += entry.size
                on_bytes(done, total)
            checkpoints.verify(folder)

    def _key(self, place: str) -> str:
        return f"{self._prefix}/{place}" if self._prefix else place

    def _hash_of(self, place: str) -> str | None:
        try:
            head = self._client.head_object(Bucket=self._bucket, Key=self._key(place))
        except self._errors:  # missing or not readable: send the file
            return None
        digest: str | None = head.get("Metadata", {}).get(_HASH)
        return digest

    def _put(self, file: Path, place: str, digest: str) -> None:
        try:
            extra = {"ExtraArgs": {"Metadata": {_HASH: digest}}} if digest else {}
            self._client.upload_file(str(file), self._bucket, self._key(place), **extra)
        except Exception as error:  # boto3's transfers also raise errors outside botocore's classes
            raise StorageError(f"cannot send {file.name} to s3://{self._bucket}/{self._key(place)}: {error}") from error

    def _get(self, place: str, file: Path) -> None:
        try:
            self._client.download_file(self._bucket, self._key(place), str(file))
        except self._errors as error:
            if getattr(error, "response", {}).get("Error", {}).get("Code") in ("404", "NoSuchKey"):
                raise NotFoundError(f"there is no s3://{self._bucket}/{self._key(place)}") from error
            raise StorageError(f"cannot fetch s3://{self._bucket}/{self._key(place)}: {error}") from error
