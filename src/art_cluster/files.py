"""How the files that calls name travel: through Ray's object store, or through a folder or bucket that all nodes see.

    server: pack  -->  object store, or `ServerConfig.cluster_files`  -->  node: unpack
            unpack  <--                                             <--  pack

Each way ends with a comparison of the SHA-256 of names and contents.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray

from art.config.base_models import looks_like_path
from art.errors import ArtError, ConfigError, ProcessError, StorageError
from art.protocol.calls import Call, LoadAdapter, PrepareWeights, SampleFile
from art.storage import checkpoints
from art.storage.atomic import new_directory, write_file

Result = TypeVar("Result")
MAX_KEPT = 12
"""Files and folders of calls that stay on the nodes: the last checkpoints, which the next calls name again."""
MAX_SENT = 3
"""Files and folders that stay in the object store or the common folder."""
_NOT_FOR_ENGINES = (checkpoints.OPTIMIZER,)
_SINGLE = "file"
"""Name of a single file in a parcel's folder."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Files in a folder or bucket that server and nodes see."""

    address: str
    names: tuple[str, ...]
    """Their paths in it; "" for a single file."""


Packed = dict[str, bytes] | Parcel
"""The content of the files of a folder, by their path in it, that of a single file under the name ""; or where they
are."""


def pack(path: Path, leave_out: tuple[str, ...] = (), address: str | None = None) -> Packed:
    """Read a file, or all files of a folder except those named in `leave_out`; with an `address` copy them there."""
    files = _files_of(path, leave_out)
    if address is None:
        return {name: file.read_bytes() for name, file in files.items()}
    system, root = _open(address)
    for name, file in files.items():
        there = f"{root}/{name or _SINGLE}"
        system.makedirs(there.rpartition("/")[0], exist_ok=True)
        system.put_file(str(file), there)
    return Parcel(address, tuple(files))


def unpack(content: Packed, path: Path, digest: str) -> None:
    """Write what `pack` returned. A folder that exists gets or replaces these files; a new one is made as a whole.

    Raises:
        StorageError: the content has not the hash `digest`, or this machine does not see it.
    """
    found = hashlib.sha256()

    def contents() -> Iterator[tuple[str, bytes]]:
        for name in sorted(content.names if isinstance(content, Parcel) else content):
            data = _read(content, name)
            found.update(_line(name, len(data), hashlib.sha256(data).digest()))
            yield name, data

    def check() -> None:
        if found.hexdigest() != digest:
            raise StorageError(f"{path} has the hash {found.hexdigest()} after the transfer, expected {digest}")

    if path.is_dir() or "" in (content.names if isinstance(content, Parcel) else content):
        files = list(contents())
        check()
        for name, data in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path / name if name else path, data)
        return
    with new_directory(path) as folder:
        for name, data in contents():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        check()


def digest_of(path: Path, leave_out: tuple[str, ...] = ()) -> str:
    """Return the hash of the names and contents that `pack` reads."""
    total = hashlib.sha256()
    for name, file in sorted(_files_of(path, leave_out).items()):
        with file.open("rb") as opened:
            total.update(_line(name, file.stat().st_size, hashlib.file_digest(opened, "sha256").digest()))
    return total.hexdigest()


def discard(address: str) -> None:
    """Delete what is under an address, if anything is."""
    system, root = _open(address)
    if system.exists(root):
        system.rm(root, recursive=True)


def own_folder(address: str, data_dir: Path) -> str:
    """Return the folder of one server in a common folder or bucket, and delete what a server that was killed has left
    there.

    Raises:
        ConfigError: the address cannot be used.
    """
    owner = hashlib.sha256(f"{socket.gethostname()}:{data_dir.absolute()}".encode()).hexdigest()[:16]
    folder = f"{address.rstrip('/')}/art-{owner}"
    try:
        discard(folder)
    except Exception as error:  # of the file system's package
        raise ConfigError(
            "`cluster_files` is a folder that all nodes see, or an address that fsspec knows and this machine may use, "
            f"such as s3://bucket/art; got {address!r}: {error}",
            param="cluster_files",
        ) from error
    return folder


def _open(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it."""
    import fsspec

    system, path = fsspec.core.url_to_fs(address)
    return system, path


def _files_of(path: Path, leave_out: tuple[str, ...]) -> dict[str, Path]:
    if path.is_file():
        return {"": path}
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    return {name: file for name, file in files.items() if name not in leave_out}


def _read(content: Packed, name: str) -> bytes:
    if not isinstance(content, Parcel):
        return content[name]
    system, root = _open(content.address)
    try:
        data: bytes = system.cat_file(f"{root}/{name or _SINGLE}")
    except FileNotFoundError as error:
        raise StorageError(
            f"{socket.gethostname()} does not see {content.address}, where the server has put files: all nodes must "
            "reach the folder or bucket of `cluster_files` under the same address"
        ) from error
    return data


def _line(name: str, size: int, digest: bytes) -> bytes:
    return f"{name}\n{size}\n".encode() + digest


class SentFiles:
    """The last files that the server has sent. All engines ask for those of a publish, which are packed once."""

    def __init__(self, folder: str | None) -> None:
        """`folder` is the server's in a common folder or bucket; `None` is Ray's object store."""
        self.folder = folder
        self._packed: OrderedDict[str, asyncio.Task[tuple[Any, str]]] = OrderedDict()
        self._users: dict[str, int] = {}

    @asynccontextmanager
    async def packed(self, key: str, path: Path, leave_out: tuple[str, ...]) -> AsyncIterator[tuple[Any, str]]:
        """Yield what nodes unpack during the body, and its hash. `key` is what `_identity` returns."""
        if key not in self._packed:
            self._packed[key] = asyncio.create_task(asyncio.to_thread(self._pack, path, leave_out), name=f"pack {path}")
        task = self._packed[key]
        self._users[key] = self._users.get(key, 0) + 1
        try:
            yield await asyncio.shield(task)
        except Exception:
            if self._packed.get(key) is task:  # the next call packs it again: an object without room is lost to Ray
                del self._packed[key]
            raise
        finally:
            self._users[key] -= 1
            await self._forget_old()

    async def _forget_old(self) -> None:
        for key in list(self._packed)[:-MAX_SENT]:
            if not self._users.get(key):
                content, _ = await self._packed.pop(key)
                self._users.pop(key, None)
                if isinstance(content, Parcel):
                    await asyncio.to_thread(discard, content.address)

    def _pack(self, path: Path, leave_out: tuple[str, ...]) -> tuple[Any, str]:
        digest = digest_of(path, leave_out)
        content = pack(path, leave_out, self.new_address())
        if isinstance(content, Parcel):
            return content, digest
        try:
            return ray.put(content), digest
        except _NO_ROOM as error:
            raise _no_room(f"{sum(map(len, content.values())):,} bytes", error) from error

    def new_address(self) -> str | None:
        return None if self.folder is None else f"{self.folder}/{secrets.token_hex(8)}"


class RayFiles:
    """Carries the files of calls to the actors of one engine or trainer, and back from the first of them."""

    def __init__(self, actors: Sequence[Any], root: str, sent: SentFiles) -> None:
        self._actors, self._sent_files = actors, sent
        self._root = Path(root)
        self._kept: OrderedDict[str, Path] = OrderedDict()
        """What the nodes have, by its hash: the path there."""
        self._made: dict[Path, Path] = {}
        """Paths that a running call writes, here and there."""

    async def sent(self, call: Call[Result]) -> Call[Result]:
        values = dict(call.params)
        for name in call.reads:
            values[name] = await self._sent(values[name], call)
        for name in call.writes:
            if values[name] is not None:
                there = self._root / secrets.token_hex(8) / values[name].name
                self._made[values[name]] = there
                values[name] = there
        return replace(call, **values)  # type: ignore[type-var]  # every call is a dataclass

    async def _sent(self, value: Any, call: Call[Any]) -> Any:
        if isinstance(value, SampleFile):
            return SampleFile(await self._send(value.path))
        if isinstance(value, dict):
            return {key: await self._send(path) for key, path in value.items()}
        if isinstance(value, str):  # a base model: a folder, or an id that the node downloads
            return str(await self._send(Path(value))) if looks_like_path(value) else value
        return await self._send(value, _NOT_FOR_ENGINES if isinstance(call, LoadAdapter | PrepareWeights) else ())

    async def _send(self, path: Path, leave_out: tuple[str, ...] = ()) -> Path:
        key = await asyncio.to_thread(_identity, path, leave_out)
        if key not in self._kept:
            there = self._root / key[:32] / path.name
            async with self._sent_files.packed(key, path, leave_out) as (content, digest):
                await finished([actor.store.remote(str(there), content, digest) for actor in self._actors])
            self._kept[key] = there
        self._kept.move_to_end(key)
        await self._forget_old()
        return self._kept[key]

    async def fetched(self, call: Call[Any]) -> None:
        for name in call.writes:
            path = getattr(call, name)
            if path is None or (there := self._made.pop(path, None)) is None:
                continue
            address = self._sent_files.new_address()
            ((content, digest),) = await finished([self._actors[0].load.remote(str(there), address)])
            await asyncio.to_thread(unpack, content, path, digest)
            if address is not None:
                await asyncio.to_thread(discard, address)
            names = content.names if isinstance(content, Parcel) else content
            if len(self._actors) == 1 and checkpoints.MANIFEST in names:  # the next step starts from it
                self._kept[_identity(path, ())] = there

    async def _forget_old(self) -> None:
        old = [str(self._kept.popitem(last=False)[1]) for _ in range(len(self._kept) - MAX_KEPT)]
        if old:
            await finished([actor.forget.remote(old) for actor in self._actors])


def _identity(path: Path, leave_out: tuple[str, ...]) -> str:
    """Return the hash of a file or folder. The manifest of a checkpoint has the hashes of its files."""
    manifest = path / checkpoints.MANIFEST
    found = digest_of(manifest if manifest.is_file() else path)
    return hashlib.sha256(" ".join((found, *leave_out)).encode()).hexdigest()


_NO_ROOM = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
"""What Ray says when neither the object store nor the disk that it spills to has room."""


def _no_room(what: str, error: Exception) -> StorageError:
    return StorageError(
        f"Ray's object store has no room for {what}, and the disk that it spills to neither ({type(error).__name__}): "
        "end what fills them (`ray memory` and `df` on the nodes tell), start the nodes with a larger "
        "--object-store-memory or more disk, or set `cluster_files` to a folder or bucket that all nodes see. What was "
        "recorded and trained is kept: call again when there is room"
    )


async def finished(works: Sequence[Any]) -> list[Any]:
    """Return the results of actors. Raises `ProcessError` if one of them is gone, `StorageError` if its node has no
    room for what it gets or returns, or the `ArtError` of one."""
    try:
        return list(await asyncio.gather(*works))
    except _NO_ROOM as error:
        raise _no_room("a file on the node of an actor", error) from error
    except ray.exceptions.RayActorError as error:
        raise ProcessError(f"an actor is gone: {str(error).splitlines()[0]}") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ArtError):
            raise error.cause from None
        raise
