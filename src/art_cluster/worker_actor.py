"""The Ray actor that runs one worker on a node: the program of `art worker`, and the files that its calls name.

Ray decides where the actor runs and tells when it is gone. Frames go over the worker's own connection to the server;
files go by `art_cluster.files`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import ray

from art.errors import StorageError
from art.storage.logs import log_tail, log_to_stderr, open_log
from art.worker.agent import WorkerAgent
from art.worker.door import WorkerKind
from art.worker.launch import child_environment
from art_cluster.files import Packed, digest_of, pack, unpack


class WorkerActor:
    """One worker on a node. Its methods are called by `RayCluster`."""

    def __init__(self, folder: str) -> None:
        """`folder` names the folder on each node of the engine or trainer that this actor belongs to."""
        log_to_stderr()
        self._root = Path(tempfile.gettempdir(), f"art-cluster-{folder}")
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

    async def store(self, path: str, content: Packed, digest: str) -> None:
        """Write files under a path, unless they are there."""

        def write() -> None:
            target = Path(path)
            if target.exists():
                return
            try:
                unpack(content, target, digest)
            except StorageError:
                if not target.exists():  # else another rank on this node was first
                    raise

        await asyncio.to_thread(write)

    async def load(self, path: str, address: str | None) -> tuple[Packed, str]:
        """Return the files under a path, copied to `address` if there is one, with their hash."""

        def read() -> tuple[Packed, str]:
            return pack(Path(path), address=address), digest_of(Path(path))

        return await asyncio.to_thread(read)

    async def forget(self, paths: list[str]) -> None:
        """Delete what is under some paths. Another rank on this node may delete the same."""
        for path in map(Path, paths):
            with contextlib.suppress(FileNotFoundError):  # another rank on this node was first
                # A kill in between must not leave a part of it under a path that names its content.
                gone = path.rename(self._root / secrets.token_hex(8))
                await asyncio.to_thread(shutil.rmtree if gone.is_dir() else os.unlink, gone)

    def leave(self) -> None:
        """Delete the folder on this node."""
        shutil.rmtree(self._root, ignore_errors=True)


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
