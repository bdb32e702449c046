"""The devices of this machine, found without torch, which the server process must not load.

`nvidia-smi`, a part of NVIDIA's driver, lists the GPUs. They are numbered as in the server's CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_QUERY_TIMEOUT_S = 30.0
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_DEVICE_FILES = (Path("/dev/nvidia0"), Path("/dev/kfd"))
"""Device files of NVIDIA's and AMD's drivers. torch calls both kinds of device "cuda"."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device that the server may use."""

    name: str
    memory_bytes: int | None
    """`None` where it is unknown, as for a slice of a GPU (MIG)."""
    selector: str
    """The GPU's name in CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True, slots=True)
class Devices:
    gpus: tuple[Gpu, ...] | None
    """The GPUs by index; `None` if there are GPUs that cannot be listed, because `nvidia-smi` is missing."""
    has_mps: bool
    memory_bytes: int
    """Main memory that this process may use."""

    @property
    def default_kind(self) -> str:
        """The kind of device that "auto" means here."""
        return "cpu" if self.gpus == () and not self.has_mps else "mps" if self.gpus == () else "cuda"


@functools.cache
def find_devices() -> Devices:
    """Find the devices of this machine. Looks once per process."""
    visible = os.environ.get(VISIBLE)
    listing = None if visible == "" else _ask_nvidia_smi()
    gpus: tuple[Gpu, ...] | None = ()
    if listing is not None:
        gpus = parse_gpus(listing, visible)
    elif visible != "" and any(path.exists() for path in _DEVICE_FILES):
        gpus = None
    has_mps = sys.platform == "darwin" and platform.machine() == "arm64"
    return Devices(gpus=gpus, has_mps=has_mps, memory_bytes=_main_memory())


def _ask_nvidia_smi() -> str | None:
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def parse_gpus(listing: str, visible: str | None) -> tuple[Gpu, ...]:
    """Parse `nvidia-smi`'s listing, one GPU per line such as "0, GPU-a, NVIDIA H100, 81559".

    Args:
        visible: the variable CUDA_VISIBLE_DEVICES. It selects and orders GPUs: "1,0" gives GPU 1, then GPU 0.
    """
    by_selector: dict[str, Gpu] = {}
    order: list[Gpu] = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4:
            continue
        index, uuid, name, mebibytes = fields
        memory_bytes = int(mebibytes) * 2**20 if mebibytes.isdigit() else None
        gpu = Gpu(name=name, memory_bytes=memory_bytes, selector=index)
        order.append(gpu)
        by_selector |= {index: gpu, uuid: gpu}
    if visible is None:
        return tuple(order)
    chosen = []
    for selector in (word.strip() for word in visible.split(",")):
        if selector.startswith("MIG"):
            chosen.append(Gpu(name="slice of a GPU", memory_bytes=None, selector=selector))
        elif (selected := _find(by_selector, selector)) is not None:
            chosen.append(replace(selected, selector=selector))
        else:
            break  # CUDA ignores what follows an unknown device
    return tuple(chosen)


def _find(by_selector: Mapping[str, Gpu], selector: str) -> Gpu | None:
    """Find a GPU by index or UUID. Like CUDA, take the beginning of a UUID for the whole."""
    exact = by_selector.get(selector)
    if exact is not None or not selector.startswith("GPU-"):
        return exact
    return next((gpu for name, gpu in by_selector.items() if name.startswith(selector)), None)


def _main_memory() -> int:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(_CGROUP_LIMIT.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # not in a container, or one without a limit ("max")
        return physical
