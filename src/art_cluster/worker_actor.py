"""The Ray actor that runs one worker on a node: the program of `art worker`, and the files that its calls name.

Ray decides where the actor runs and tells when it is gone. Frames go over the worker's own connection to the server;
files go through Ray's object store, and are checked by their hashes on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import ray

from art.errors import StorageError
from art.storage.atomic import new_directory, write_file
from art.storage.logs import log_tail, log_to_stderr, open_log
from art.worker.agent import WorkerAgent
from art.worker.door import WorkerKind
from art.worker.launch import child_environment

Files = dict[str, bytes]
"""The content of the files of a folder, by their path in it; that of a single file under the name ""."""


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the hash of names and contents."""
    total = hashlib.sha256()
    for name, content in sorted(files.items()):
        total.update(f"{name}\n{len(content)}\n".encode() + hashlib.sha256(content).digest())
    return total.hexdigest()


def read_files(path: Path, leave_out: tuple[str, ...] = ()) -> Files:
    """Read a file, or all files of a folder except those named in `leave_out`."""
    if path.is_file():
        return {"": path.read_bytes()}
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if name not in leave_out}


def write_files(folder: Path, files: Files) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


class WorkerActor:
    """One worker on a node. Its methods are called by `RayCluster`."""

    def __init__(self, session: str) -> None:
        """`session` names the server's folder on each node."""
        log_to_stderr()
        self._root = Path(tempfile.gettempdir(), f"art-cluster-{session}")
        self._root.mkdir(exist_ok=True, mode=0o700)

    def root(self) -> str:
        """Return the folder on this node that paths of calls are in."""
        return str(self._root)

    def machine(self) -> str:
        return f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"

    def meeting_point(self) -> tuple[str, int]:
        """Return address and free port at which the ranks of a trainer can meet on this node."""
        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as free:
            return address, int(free.getsockname()[1])

    async def work(self, kind: WorkerKind, address: str, key: str, ticket: str, variables: dict[str, str]) -> None:
        """Be a worker of the server whose door is at `address`, until this actor is killed."""
        os.environ.update(variables | _network_variables(variables))
        await WorkerAgent(kind, address, key, ticket=ticket, log_dir=self._root).run()

    async def run_rank(self, config: str, num_threads: int, variables: dict[str, str]) -> str:
        """Run rank 1, 2, ... of a trainer until it ends, and return its last words. `config` is a `TrainerConfig`."""
        log_path = self._root / f"trainer.log.{variables['RANK']}"
        with open_log(log_path) as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "art.worker.trainer_child", "--member", config,
                stdin=subprocess.PIPE, stdout=log, stderr=log,
                env=child_environment(num_threads, variables | _network_variables(variables)),
            )  # fmt: skip
        await process.wait()
        return f"exit status {process.returncode}{log_tail(log_path)}"

    async def store(self, path: str, files: Files, digest: str) -> None:
        """Write files under a path, unless they are there."""

        def write() -> None:
            target = Path(path)
            if target.exists():
                return
            if (found := digest_of(files)) != digest:
                raise ValueError(f"{path} has the hash {found} after the transfer, expected {digest}")
            target.parent.mkdir(parents=True, exist_ok=True)
            if "" in files:
                write_file(target, files[""])
                return
            try:
                with new_directory(target) as folder:
                    write_files(folder, files)
            except StorageError:
                if not target.exists():  # else another rank on this node was first
                    raise

        await asyncio.to_thread(write)

    async def load(self, path: str) -> tuple[Files, str]:
        """Return the files under a path, with their hash."""

        def read() -> tuple[Files, str]:
            files = read_files(Path(path))
            return files, digest_of(files)

        return await asyncio.to_thread(read)

    async def forget(self, paths: list[str]) -> None:
        """Delete what is under some paths. Another rank on this node may delete the same."""
        for path in map(Path, paths):
            await asyncio.to_thread(_delete, path)

    def leave(self) -> None:
        """Delete the server's folder on this node."""
        shutil.rmtree(self._root, ignore_errors=True)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _network_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Name the network interface by which the ranks of a trainer reach each other: that of Ray's address. By itself
    gloo takes the one that belongs to the machine's name, which is often loopback."""
    if sys.platform != "linux" or "MASTER_ADDR" not in variables:
        return {}
    import fcntl
    import struct

    wanted = socket.inet_aton(ray.util.get_node_ip_address())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                asked = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(sock, 0x8915, asked)[20:24] == wanted:  # SIOCGIFADDR
                    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}
