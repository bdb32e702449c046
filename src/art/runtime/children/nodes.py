"""Trainer processes on other machines: how they are started, which network they use, and which versions they run."""

from __future__ import annotations

import os
import shlex
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from art.config.losses import LOSS_PATH_VARIABLE
from art.config.nodes import RECEIVED_VARIABLE
from art.errors import ConfigError

if TYPE_CHECKING:
    from art.trainer.machine.distributed import Team

_PASSED_ON = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONPATH", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
    *(LOSS_PATH_VARIABLE, RECEIVED_VARIABLE),
)
_PASSED_ON_PREFIXES = ("OMP_", "MKL_", "TORCH_", "PYTORCH_", "NCCL_", "CUDA_")
_NEVER = ("NCCL_SOCKET_IFNAME",)
"""Variables that name a part of one machine."""
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of a network interface."""


def remote_script(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Write the shell command that runs `command` on another machine with these variables.

    It runs in the folder of this process if that machine has it too, since names of modules and models may be relative.
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
    return f"cd {shlex.quote(os.getcwd())} 2>/dev/null; exec {shlex.join(['env', *settings, *command])}"


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


def check_versions(team: Team) -> None:
    """Check that all processes run the same versions of ART and torch.

    Raises:
        ConfigError: a process on another machine does not.
    """
    import torch

    import art

    with team.call():
        machines = team.gather((socket.gethostname(), f"ART {art.__version__} with torch {torch.__version__}"))
        for rank, (host, versions) in enumerate(machines):
            if versions != machines[0][1]:
                raise ConfigError(
                    f"process {rank} of the trainer, on {host}, runs {versions}, and the first one {machines[0][1]}: "
                    "install the same versions on all machines",
                    param="nodes",
                )
