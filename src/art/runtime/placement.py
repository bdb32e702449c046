"""Devices of this machine, and the choice of devices and engine for a model, before any process starts.

The server process must not load torch, so `nvidia-smi`, a part of NVIDIA's driver, lists the GPUs. They are numbered as
in the server's CUDA_VISIBLE_DEVICES. A child sees only its own GPUs and numbers them from 0. Where the settings leave
the choice open:

    one GPU                       engine and trainer share it
    more than the trainer takes   the trainer gets the first ones, the engine the next, split between its replicas
    several base models           first come the GPUs that the fewest other engines and trainers use
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from art.config import EngineConfig, EngineSettings, ModelSettings, TrainerConfig, VllmConfig
from art.engines.vllm.command import find_installation, installed_vllm_python
from art.errors import ConfigError

logger = logging.getLogger(__name__)


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
    gpus: tuple[Gpu, ...] | None = ()
    if visible != "":
        try:
            asked = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
            gpus = parse_gpus(asked.stdout, visible)
        except (OSError, subprocess.SubprocessError):
            gpus = None if any(path.exists() for path in _DEVICE_FILES) else ()
    has_mps = sys.platform == "darwin" and platform.machine() == "arm64"
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # not in a container, or one without a limit ("max")
        memory_bytes = min(memory_bytes, int(_CGROUP_LIMIT.read_text(encoding="utf-8")))
    return Devices(gpus=gpus, has_mps=has_mps, memory_bytes=memory_bytes)


def parse_gpus(listing: str, visible: str | None) -> tuple[Gpu, ...]:
    """Parse `nvidia-smi`'s listing, one GPU per line such as "0, GPU-a, NVIDIA H100, 81559". `visible`, the variable
    CUDA_VISIBLE_DEVICES, selects and orders GPUs: "1,0" gives GPU 1, then GPU 0."""
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
            continue
        # Like CUDA, take the beginning of a UUID for the whole.
        names = [name for name in by_selector if selector.startswith("GPU-") and name.startswith(selector)]
        if (found := by_selector.get(selector if selector in by_selector else next(iter(names), ""))) is None:
            break  # CUDA ignores what follows an unknown device
        chosen.append(replace(found, selector=selector))
    return tuple(chosen)


Part = Literal["engine", "trainer"]

ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class AssignedDevices:
    """The devices of the engine or of the trainer."""

    kind: str
    """`cpu`, `cuda`, `mps`, or `elsewhere` for vLLM servers that run already and for a cluster."""
    indices: tuple[int, ...] = ()
    """Indices of the GPUs in the server's numbering."""
    reason: str = field(default="", compare=False)
    """Why these devices, for people."""

    def __str__(self) -> str:
        return ", ".join(f"cuda:{index}" for index in self.indices) or self.kind

    def split(self, count: int) -> list[AssignedDevices]:
        """Return the devices of each of `count` replicas: an equal share of the GPUs, in order."""
        size = len(self.indices) // count
        return [replace(self, indices=self.indices[i * size : (i + 1) * size]) for i in range(count)]

    def environment(self, devices: Devices) -> dict[str, str]:
        """Return the environment variables that show a process only these devices."""
        if self.kind != "cuda":
            return {VISIBLE: ""} if self.kind == "cpu" else {}
        if not self.indices or devices.gpus is None:
            return {}
        gpus = devices.gpus
        selected = ",".join(gpus[index].selector for index in self.indices if index < len(gpus))
        # nvidia-smi orders GPUs by PCI bus. CUDA orders them by speed, unless this variable says otherwise.
        by_bus = all(gpus[index].selector.isdigit() for index in self.indices if index < len(gpus))
        return {VISIBLE: selected} | ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if by_bus else {})


@dataclass(frozen=True, slots=True)
class Placement:
    engine: AssignedDevices
    trainer: AssignedDevices
    sleeps: bool = False
    """Whether the engine sleeps while the trainer works."""

    @property
    def shared(self) -> bool:
        """Whether engine and trainer use the same memory."""
        if ELSEWHERE in (self.engine.kind, self.trainer.kind):
            return False
        if self.engine.kind != "cuda" or self.trainer.kind != "cuda":
            return self.engine.kind == self.trainer.kind
        return bool(set(self.engine.indices) & set(self.trainer.indices))


def choose_placement(settings: ModelSettings, devices: Devices, in_use: Mapping[int, int] | None = None) -> Placement:
    """Choose devices by the settings, else by the table of this module. `check_placement` tells whether they work.
    `in_use` counts the engines and trainers of other base models on each GPU."""
    engine, trainer = settings.engine, settings.trainer
    order = sorted(range(len(devices.gpus or ())), key=lambda index: ((in_use or {}).get(index, 0), index))
    placed = _assign("trainer", trainer, trainer.num_processes, engine.device_indices, devices, order)
    if isinstance(engine, VllmConfig) and engine.urls:
        return Placement(
            engine=AssignedDevices(ELSEWHERE, reason="`engine.urls` names servers that run already"), trainer=placed
        )
    if isinstance(engine, VllmConfig) and engine.uses_ray:
        return Placement(
            engine=AssignedDevices("cuda", reason="Ray chooses its GPUs, here and elsewhere"), trainer=placed
        )
    chosen = _assign("engine", engine, _num_engine_gpus(engine), placed.indices, devices, order)
    placement = Placement(engine=chosen, trainer=placed)
    # Without a GPU a sleep would free nothing.
    may_sleep = isinstance(engine, VllmConfig) and (
        engine.sleep == "always" or (engine.sleep == "auto" and chosen.kind == "cuda")
    )
    return replace(placement, sleeps=may_sleep and placement.shared)


def _num_engine_gpus(engine: EngineSettings) -> int:
    return engine.num_replicas * devices_per_engine(engine)


def devices_per_engine(engine: EngineSettings) -> int:
    return engine.num_devices if isinstance(engine, VllmConfig) else 1


def with_replicas(settings: ModelSettings, num_replicas: int) -> ModelSettings:
    """Decide `replicas="auto"`."""
    if settings.engine.replicas != "auto":
        return settings
    engine = settings.engine.model_copy(update={"replicas": max(1, num_replicas)})
    return settings.model_copy(update={"engine": engine})


def replicas_beside_trainer(settings: ModelSettings, devices: Devices) -> int:
    """Return the engines that the GPUs of this machine have room for; 1 without any."""
    engine, trainer = settings.engine, settings.trainer
    kind = devices.default_kind if engine.device == "auto" else engine.device
    if kind != "cuda":
        return 1
    num_gpus = len(engine.device_indices) or len(devices.gpus or ()) - trainer.num_processes
    return num_gpus // devices_per_engine(engine)


def _assign(
    part: Part,
    config: EngineSettings | TrainerConfig,
    num_devices: int,
    taken: tuple[int, ...],
    devices: Devices,
    order: list[int],
) -> AssignedDevices:
    """Choose the first GPUs in `order` that are not taken, or the first of all if too few are left."""
    if config.device_indices:
        return AssignedDevices("cuda", config.device_indices, f"`{part}.device_indices` says so")
    kind = devices.default_kind if config.device == "auto" else config.device
    why = f"`{part}.device` is {config.device!r}"
    if kind != "cuda":
        return AssignedDevices(kind, (), "there is no GPU here" if config.device == "auto" and kind == "cpu" else why)
    other = "trainer" if part == "engine" else "engine"
    free = [index for index in order if index not in taken]
    if len(free) >= num_devices:
        away = f", beside those of its {other}" if taken else ""
        return AssignedDevices(kind, tuple(sorted(free[:num_devices])), f"least used by other base models{away}")
    return AssignedDevices(
        kind, tuple(sorted(order[:num_devices])), f"no GPU is left beside those of its {other}: they share"
    )


def smallest_memory(assigned: AssignedDevices, devices: Devices) -> int | None:
    """Memory in bytes of the smallest assigned GPU, or of all where none is named; `None` if unknown."""
    gpus = devices.gpus or ()
    sizes = [gpus[index].memory_bytes for index in assigned.indices or range(len(gpus)) if index < len(gpus)]
    return min((size for size in sizes if size is not None), default=None) if assigned.kind == "cuda" else None


def check_placement(placement: Placement, settings: ModelSettings, devices: Devices) -> None:
    """Refuse a placement that cannot work. `art.runtime.memory` checks its memory. Raises `ConfigError` if a
    device is missing, or there are fewer devices than processes."""
    gpus, engine, trainer = devices.gpus or (), settings.engine, settings.trainer
    names = ", ".join(f"{index}: {gpu.name}" for index, gpu in enumerate(gpus))
    shown = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'} ({names})" if gpus else "no NVIDIA GPU"
    for part, assigned, config in (("engine", placement.engine, engine), ("trainer", placement.trainer, trainer)):
        setting = f"`{part}.device` is {config.device!r}"
        if assigned.kind == "mps" and not devices.has_mps:
            raise ConfigError(f'{setting}, but this is no Mac with Apple silicon; use "auto" or "cpu"', param="device")
        if assigned.kind != "cuda" or devices.gpus is None:
            continue
        if config.device_indices:
            setting = f"`{part}.device_indices` is {list(config.device_indices)}"
        if not gpus:
            hint = f'Is the driver installed, and {VISIBLE} not empty? Else use "auto" or "cpu"'
            raise ConfigError(f"{setting}, but this machine shows {shown}. {hint}", param="device")
        if max(config.device_indices, default=0) >= len(gpus):
            indices = f"use indices from 0 to {len(gpus) - 1}"
            raise ConfigError(f"{setting}, but this machine shows {shown}; {indices}", param="device_indices")
    vllm = engine if isinstance(engine, VllmConfig) else None
    num_gpus = _num_engine_gpus(engine)
    is_local = placement.engine.kind == "cuda" and not (vllm is not None and vllm.uses_ray)
    if is_local and devices.gpus is not None and len(placement.engine.indices) != num_gpus:
        if engine.num_replicas > 1:
            each = num_gpus // engine.num_replicas
            raise ConfigError(
                f"`engine.replicas` is {engine.replicas}, each on {each} GPU{'' if each == 1 else 's'} of its own, so "
                f"{num_gpus} are needed, but the engine has {placement.engine}, of {shown}; lower `replicas`, or name "
                "as many by `device_indices`",
                param="replicas",
            )
        raise ConfigError(
            f"the flags of vLLM make {num_gpus} GPUs (data, pipeline and tensor parallel sizes together), but the "
            f"engine has {placement.engine}, of {shown}; make the two agree",
            param="flags",
        )
    if vllm is not None and vllm.sleep == "always" and not placement.shared:
        raise ConfigError(
            f'`engine.sleep` is "always", but the engine runs on {placement.engine} and the trainer on '
            f"{placement.trainer}: it would pause for nothing. Leave `sleep` out, or give both the same device",
            param="sleep",
        )
    is_unknown = is_local and devices.gpus is None
    if engine.num_replicas > 1 and (placement.engine.kind == "mps" or is_unknown):
        why = "`nvidia-smi` lists no GPUs that they could divide" if is_unknown else 'the device is "mps", a single one'
        raise ConfigError(f"`engine.replicas` is {engine.replicas}, but {why}; set it to 1", param="replicas")
    processes = f"`trainer.num_processes` is {trainer.num_processes}"
    is_cuda = placement.trainer.kind == "cuda" and devices.gpus is not None
    if is_cuda and len(placement.trainer.indices) < trainer.num_processes:
        problem = f"{processes}, each on a GPU of its own, but this machine shows {shown}; lower `num_processes`"
        raise ConfigError(problem, param="num_processes")
    if placement.trainer.kind == "mps" and trainer.num_processes > 1:
        raise ConfigError(f'{processes}, but the device is "mps", a single one; set it to 1', param="num_processes")


def split_threads(engine_threads: int | None, trainer_threads: int | None) -> tuple[int, int]:
    """Return the thread counts of engine and trainer: as configured, else disjoint halves of the usable cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    half = max(1, cores // 2)
    return engine_threads or half, trainer_threads or max(1, cores - half)


SLOW = (
    "the embedded engine samples on this GPU, many times slower than vLLM: it has no CUDA graphs and no paged attention"
)
FASTER = "install vLLM (docs/engines.md) and use `VllmConfig`"


def with_engine(settings: ModelSettings, devices: Devices) -> ModelSettings:
    """Return `settings` with the engine that serves them on this machine. One that they name is kept.

    vLLM is left out where it cannot do what the settings ask for: full fine-tuning and a rounded base model.
    """
    if "engine" in settings.model_fields_set:
        return settings
    can_be_vllm = settings.lora is not None and settings.trainer.quantization == "none"
    if can_be_vllm and devices.gpus and (python := installed_vllm_python()) is not None:
        try:
            installation = find_installation(python)
        except ConfigError as error:
            logger.warning("the embedded engine is used, since vLLM cannot be: %s", error.message)
        else:
            if installation.device == "cuda":
                logger.info("vLLM %s samples; settings with an `engine` choose another", installation.vllm)
                return settings.model_copy(update={"engine": VllmConfig()})
    return settings.model_copy(update={"engine": settings.engine})


def is_slow(settings: ModelSettings, engine_kind: str) -> bool:
    """Whether the embedded engine samples on an NVIDIA GPU."""
    return engine_kind == "cuda" and isinstance(settings.engine, EngineConfig)
