"""Checks of versions, devices and disk space, without torch."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from art.engine import EngineInfo
from art.engines.vllm.command import TORCH_OF_VLLM, find_installation, vllm_python
from art.errors import ConfigError
from art.protocol.preflight import CheckResult
from art.runtime.placement.placement import ELSEWHERE, Placement

DISTRIBUTION = "agent-reinforcement-trainer"
LIBRARIES = ("torch", "transformers", "peft", "tokenizers", "renderers")
DISK_SPACE = "disk space"
FEWEST_CHECKPOINTS, MANY_CHECKPOINTS = 2, 100
"""Free space for fewer than the first fails: a step is written beside the one before. Fewer than the second warns."""

VersionOf = Callable[[str], str | None]


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def declared_requirements(distribution: str = DISTRIBUTION) -> list[Requirement]:
    """What a distribution declares to need, its extras included; nothing if it is not installed."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(Requirement(line))
        except InvalidRequirement:
            continue
    return found


def check_versions(
    version_of: VersionOf = installed_version, requirements: Iterable[Requirement] | None = None
) -> CheckResult:
    """Whether each library has a version that ART's own metadata allows.

    The ranges there are what ART is tested with.
    """
    wanted = list(declared_requirements() if requirements is None else requirements)
    seen, wrong, missing = [], [], []
    for name in LIBRARIES:
        version = version_of(name)
        if version is None:
            missing.append(name)
            continue
        seen.append(f"{name} {version}")
        wrong += [
            f"{name} {version}, where {item.specifier} is expected"
            for item in wanted
            if item.name == name and not item.specifier.contains(version, prereleases=True)
        ]
    if missing:
        return CheckResult(
            name="versions",
            status="failure",
            found=f"not installed: {', '.join(missing)}",
            remedy=f"pip install '{DISTRIBUTION}[local]'",
            measured={},
        )
    if wrong:
        return CheckResult(
            name="versions",
            status="warning",
            found="; ".join(dict.fromkeys(wrong)),
            remedy="install versions in the range",
        )
    return CheckResult(name="versions", status="ok", found=", ".join(seen))


def check_vllm(python: str | None) -> CheckResult:
    """Whether the environment of the interpreter `python` has a vLLM with the torch that it is built for."""
    try:
        found = find_installation(vllm_python(python))
    except ConfigError as error:
        remedy = "install the versions that belong together; docs/engines.md says how"
        return CheckResult(name="vLLM", status="failure", found=error.message, remedy=remedy)
    known = ".".join(found.vllm.split(".")[:2]) in TORCH_OF_VLLM
    return CheckResult(
        name="vLLM",
        status="ok" if known else "warning",
        found=f"vllm {found.vllm} with torch {found.torch}, built for {found.device}",
        remedy=None if known else f"tried were vllm {', '.join(TORCH_OF_VLLM)}",
    )


def check_devices(placement: Placement, engine: EngineInfo) -> CheckResult:
    """Whether the engine really runs where it was placed."""
    sharing = "they share its memory" if placement.shared else "each has memory of its own"
    if placement.sleeps:
        sharing += ", and the engine sleeps while the trainer works"
    found = f"engine on {placement.engine} in {engine.dtype}, trainer on {placement.trainer}; {sharing}"
    if placement.engine.kind not in (ELSEWHERE, engine.device.split(":")[0]):
        return CheckResult(
            name="devices",
            status="warning",
            found=f"{found}; but the engine runs on {engine.device}",
            remedy='this torch cannot use the GPU: install a build of torch for it, or say device "cpu" to mean it',
        )
    return CheckResult(name="devices", status="ok", found=found)


def check_disk(data_dir: Path, checkpoint: Path, free_bytes: int | None = None) -> CheckResult:
    """Whether further checkpoints like `checkpoint` fit beside it."""
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    free = shutil.disk_usage(data_dir).free if free_bytes is None else free_bytes
    room = free // max(1, size)
    found = f"{free / 2**30:.1f} GiB free in {data_dir}, room for {room:,} checkpoints of {size / 2**20:.1f} MiB"
    measured = {"free_bytes": float(free), "checkpoint_bytes": float(size)}
    if room >= MANY_CHECKPOINTS:
        return CheckResult(name=DISK_SPACE, status="ok", found=found, measured=measured)
    return CheckResult(
        name=DISK_SPACE,
        status="warning" if room >= FEWEST_CHECKPOINTS else "failure",
        found=found,
        remedy="free some space, choose another data directory, or call `model.delete_checkpoints()` now and then",
        measured=measured,
    )
