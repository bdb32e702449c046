"""Choice of devices for engine and trainer, and a check that they can work, before any process starts.

A child sees only its own GPUs (CUDA_VISIBLE_DEVICES) and numbers them from 0. Where the settings leave the choice open:

    one GPU                       engine and trainer share it
    more than the trainer takes   the trainer gets the first ones, the engine the next
    several base models           first come the GPUs that the fewest other engines and trainers use
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from art.config import EngineSettings, ModelSettings, TrainerConfig, VllmConfig
from art.errors import ConfigError
from art.runtime.placement.devices import VISIBLE, Devices

Part = Literal["engine", "trainer"]

ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class Place:
    """The devices of the engine or of the trainer."""

    kind: str
    """`cpu`, `cuda`, `mps`, or `elsewhere` for vLLM servers that run already."""
    indices: tuple[int, ...] = ()
    """Indices of the GPUs in the server's numbering."""
    reason: str = field(default="", compare=False)
    """Why these devices, for people."""

    def __str__(self) -> str:
        return ", ".join(f"cuda:{index}" for index in self.indices) or self.kind

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
    engine: Place
    trainer: Place
    sleeps: bool = False
    """Whether the engine sleeps while the trainer works."""

    @property
    def takes_turns(self) -> bool:
        """Whether engine and trainer cannot compute at the same time: on one GPU, or on one core."""
        return self.sleeps or (self.shared and (self.engine.kind != "cpu" or usable_cores() == 1))

    @property
    def shared(self) -> bool:
        """Whether engine and trainer use the same memory."""
        if self.engine.kind != "cuda" or self.trainer.kind != "cuda":
            return self.engine.kind == self.trainer.kind
        return bool(set(self.engine.indices) & set(self.trainer.indices))


def choose_placement(settings: ModelSettings, devices: Devices, in_use: Mapping[int, int] | None = None) -> Placement:
    """Choose devices by the settings, else by the table of this module. `check_placement` tells whether they work.

    Args:
        in_use: number of engines and trainers of other base models on each GPU, by its index.
    """
    engine, trainer = settings.engine, settings.trainer
    order = sorted(range(len(devices.gpus or ())), key=lambda index: ((in_use or {}).get(index, 0), index))
    placed = _place("trainer", trainer, trainer.num_processes, engine.device_indices, devices, order)
    if isinstance(engine, VllmConfig) and engine.urls:
        return Placement(engine=Place(ELSEWHERE, reason="`engine.urls` names servers that run already"), trainer=placed)
    if isinstance(engine, VllmConfig) and engine.uses_ray:
        return Placement(engine=Place("cuda", reason="Ray chooses its GPUs, here and elsewhere"), trainer=placed)
    num_engine_gpus = engine.num_devices if isinstance(engine, VllmConfig) else 1
    chosen = _place("engine", engine, num_engine_gpus, placed.indices, devices, order)
    placement = Placement(engine=chosen, trainer=placed)
    return replace(placement, sleeps=isinstance(engine, VllmConfig) and _sleeps(engine, placement))


def _place(
    part: Part,
    config: EngineSettings | TrainerConfig,
    num_devices: int,
    taken: tuple[int, ...],
    devices: Devices,
    order: list[int],
) -> Place:
    """Choose the first GPUs in `order` that are not taken, or the first of all if too few are left."""
    if config.device_indices:
        return Place("cuda", config.device_indices, f"`{part}.device_indices` says so")
    kind = devices.default_kind if config.device == "auto" else config.device
    why = f"`{part}.device` is {config.device!r}"
    if kind != "cuda":
        return Place(kind, (), "there is no GPU here" if config.device == "auto" and kind == "cpu" else why)
    other = "trainer" if part == "engine" else "engine"
    free = [index for index in order if index not in taken]
    if len(free) >= num_devices:
        away = f", beside those of its {other}" if taken else ""
        return Place(kind, tuple(sorted(free[:num_devices])), f"least used by other base models{away}")
    return Place(kind, tuple(sorted(order[:num_devices])), f"no GPU is left beside those of its {other}: they share")


def _sleeps(engine: VllmConfig, placement: Placement) -> bool:
    """Tell whether vLLM sleeps while the trainer works. Without a GPU a sleep would free nothing."""
    may_sleep = engine.sleep == "always" or (engine.sleep == "auto" and placement.engine.kind == "cuda")
    return may_sleep and placement.shared


def smallest_memory(place: Place, devices: Devices) -> int | None:
    """Memory in bytes of the smallest GPU of `place`, or of all where it has no indices; `None` if unknown."""
    gpus = devices.gpus or ()
    sizes = [gpus[index].memory_bytes for index in place.indices or range(len(gpus)) if index < len(gpus)]
    return min((size for size in sizes if size is not None), default=None) if place.kind == "cuda" else None


def check_placement(placement: Placement, settings: ModelSettings, devices: Devices) -> None:
    """Refuse a placement that cannot work. `art.runtime.placement.memory` checks its memory.

    Raises:
        ConfigError: a device is missing, or there are fewer devices than processes.
    """
    _check_device("engine", placement.engine, settings.engine, devices)
    _check_device("trainer", placement.trainer, settings.trainer, devices)
    num_gpus = settings.engine.num_devices if isinstance(settings.engine, VllmConfig) else 1
    uses_ray = isinstance(settings.engine, VllmConfig) and settings.engine.uses_ray
    is_local = placement.engine.kind == "cuda" and not uses_ray
    if is_local and devices.gpus is not None and len(placement.engine.indices) != num_gpus:
        raise ConfigError(
            f"the flags of vLLM make {num_gpus} GPUs (data, pipeline and tensor parallel sizes together), but the "
            f"engine has {placement.engine}, of {_gpus(devices)}; make the two agree",
            param="flags",
        )
    if isinstance(settings.engine, VllmConfig) and settings.engine.sleep == "always" and not placement.shared:
        raise ConfigError(
            f'`engine.sleep` is "always", but the engine runs on {placement.engine} and the trainer on '
            f"{placement.trainer}: it would pause for nothing. Leave `sleep` out, or give both the same device",
            param="sleep",
        )
    num_processes, num_devices = settings.trainer.num_processes, len(placement.trainer.indices)
    if placement.trainer.kind == "cuda" and devices.gpus is not None and num_devices < num_processes:
        raise ConfigError(
            f"`trainer.num_processes` is {num_processes}, each on a GPU of its own, but this machine shows "
            f"{_gpus(devices)}; lower `num_processes`",
            param="num_processes",
        )
    if placement.trainer.kind == "mps" and num_processes > 1:
        raise ConfigError(
            f'`trainer.num_processes` is {num_processes}, but the device is "mps", a single one; set it to 1',
            param="num_processes",
        )


def _check_device(part: Part, place: Place, config: EngineSettings | TrainerConfig, devices: Devices) -> None:
    setting = f"`{part}.device` is {config.device!r}"
    if place.kind == "mps" and not devices.has_mps:
        raise ConfigError(f'{setting}, but this is no Mac with Apple silicon; use "auto" or "cpu"', param="device")
    if place.kind != "cuda" or devices.gpus is None:
        return
    if config.device_indices:
        setting = f"`{part}.device_indices` is {list(config.device_indices)}"
    if not devices.gpus:
        raise ConfigError(
            f"{setting}, but this machine shows {_gpus(devices)}. Is the driver installed, and {VISIBLE} not empty? "
            'Else use "auto" or "cpu"',
            param="device",
        )
    if missing := [index for index in config.device_indices if index >= len(devices.gpus)]:
        raise ConfigError(
            f"{setting}, but this machine shows {_gpus(devices)}, so there is no {missing[0]}; use indices from 0 to "
            f"{len(devices.gpus) - 1}",
            param="device_indices",
        )


def _gpus(devices: Devices) -> str:
    gpus = devices.gpus or ()
    names = ", ".join(f"{index}: {gpu.name}" for index, gpu in enumerate(gpus))
    return f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'} ({names})" if gpus else "no NVIDIA GPU"


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def split_threads(engine_threads: int | None, trainer_threads: int | None) -> tuple[int, int]:
    """Return the thread counts of engine and trainer: as configured, else disjoint halves of the usable cores."""
    cores = usable_cores()
    half = max(1, cores // 2)
    return engine_threads or half, trainer_threads or max(1, cores - half)
