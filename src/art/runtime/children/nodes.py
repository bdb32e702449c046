"""Trainer processes on other machines: how they are started, which network they use, and what they must share."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from art.errors import ConfigError

if TYPE_CHECKING:
    from art.trainer.machine.distributed import Team

_PASSED_ON = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONPATH", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
)
_PASSED_ON_PREFIXES = ("OMP_", "MKL_", "TORCH_", "PYTORCH_", "NCCL_", "CUDA_")
_NEVER = ("NCCL_SOCKET_IFNAME",)
"""Variables that name a part of one machine."""
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of a network interface."""


def remote_script(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Write the shell command that runs `command` on another machine, in this folder and with these variables.

    Only variables that training depends on are passed on. A list of GPUs is, if it counts them: names of GPUs (UUIDs)
    belong to one machine. Keys and tokens are not, since others could see them in the list of processes.
    """
    variables = {
        name: value
        for name, value in environment.items()
        if (name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)) and name not in _NEVER
    }
    if not variables.get("CUDA_VISIBLE_DEVICES", "").replace(",", "").isdigit():
        variables.pop("CUDA_VISIBLE_DEVICES", None)
    settings = [f"{name}={value}" for name, value in sorted(variables.items())]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *settings, *command])}"


def interface_towards(address: str) -> str | None:
    """Return the name of the network interface through which this machine reaches `address`, on Linux.

    `None` if it has no name or this is not Linux; torch then chooses by itself.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: it only asks for the route
        except OSError:
            return None
        own: str = probe.getsockname()[0]
        if own.startswith("127."):
            return "lo"
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return None


def check_nodes(team: Team, shared: Path) -> None:
    """Check that all processes see the folder `shared`, and run the same versions of ART and torch.

    Raises:
        ConfigError: a process on another machine does not.
    """
    import torch

    import art

    def leave_token() -> tuple[str, str]:
        token = secrets.token_hex(8)
        shared.mkdir(parents=True, exist_ok=True)
        path = shared / f".seen-{token}"
        path.write_text(token, encoding="utf-8")
        return str(path), token

    with team.call():
        path, token = team.from_first(leave_token)
        sees = Path(path).is_file() and Path(path).read_text(encoding="utf-8") == token
        machines = team.gather((socket.gethostname(), sees, f"ART {art.__version__} with torch {torch.__version__}"))
        team.from_first(lambda: Path(path).unlink(missing_ok=True))
        for rank, (host, sees, versions) in enumerate(machines):
            if not sees:
                raise ConfigError(
                    f"process {rank} of the trainer, on {host}, does not see the data directory: {shared} is not the "
                    "same folder there. Put the data directory on a file system that all machines share, at the same "
                    "path",
                    param="nodes",
                )
            if versions != machines[0][2]:
                raise ConfigError(
                    f"process {rank} of the trainer, on {host}, runs {versions}, and the first one {machines[0][2]}: "
                    "install the same versions on all machines",
                    param="nodes",
                )
