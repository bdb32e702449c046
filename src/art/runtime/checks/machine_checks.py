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
from art.protocol.preflight import CheckResult, CheckStatus
from art.runtime.placement.placement import ELSEWHERE, Placement

DISTRIBUTION = "agent-reinforcement-trainer"
LIBRARIES = ("torch", "transformers", "peft", "tokenizers", "renderers")
DISK_SPACE = "disk space"
FEWEST_CHECKPOINTS, MANY_CHECKPOINTS = 2, 100
"""Free space for fewer checkpoints than the first number is a failure, because a step is written beside the one before.
Free space for fewer than the second is a warning."""

VersionOf = Callable[[str], str | None]


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def declared_requirements(distribution: str = DISTRIBUTION) -> list[Requirement]:
    """The requirements that a distribution declares, with its extras; empty if it is not installed."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    requirements = []
    for line in lines:
        try:
            requirements.append(Requirement(line))
        except InvalidRequirement:
            continue
    return requirements


def check_versions(
    version_of: VersionOf = installed_version, requirements: Iterable[Requirement] | None = None
) -> CheckResult:
    """Check that each library has a version that ART's metadata allows: the versions that ART is tested with."""
    declared = list(declared_requirements() if requirements is None else requirements)
    seen, wrong, missing = [], [], []
    for name in LIBRARIES:
        version = version_of(name)
        if version is None:
            missing.append(name)
            continue
        seen.append(f"{name} {version}")
        wrong += [
            f"{name} {version}, where {item.specifier} is expected"
            for item in declared
            if item.name == name and not item.specifier.contains(version, prereleases=True)
        ]
    name, problem = "versions", f"not installed: {', '.join(missing)}"
    if missing:
        return CheckResult(name=name, status="failure", found=problem, remedy=f"pip install '{DISTRIBUTION}[local]'")
    if wrong:
        problem = "; ".join(dict.fromkeys(wrong))
        return CheckResult(name=name, status="warning", found=problem, remedy="install the expected versions")
    return CheckResult(name=name, status="ok", found=", ".join(seen))


def check_vllm(python: str | None) -> CheckResult:
    """Check that the environment of the interpreter `python` has a vLLM with the torch that it is built for."""
    try:
        installation = find_installation(vllm_python(python))
    except ConfigError as error:
        remedy = "install matching versions; see docs/engines.md"
        return CheckResult(name="vLLM", status="failure", found=error.message, remedy=remedy)
    known = ".".join(installation.vllm.split(".")[:2]) in TORCH_OF_VLLM
    return CheckResult(
        name="vLLM",
        status="ok" if known else "warning",
        found=f"vllm {installation.vllm} with torch {installation.torch}, built for {installation.device}",
        remedy=None if known else f"ART is tested with vllm {', '.join(TORCH_OF_VLLM)}",
    )


def check_devices(placement: Placement, engine: EngineInfo) -> CheckResult:
    """Check that the engine runs on the device where it was placed."""
    sharing = "they share its memory" if placement.shared else "each has memory of its own"
    if placement.sleeps:
        sharing += ", and the engine sleeps while the trainer works"
    measured = {"takes_turns": float(placement.takes_turns)}
    devices = f"engine on {placement.engine} in {engine.dtype}, trainer on {placement.trainer}; {sharing}"
    if placement.engine.kind not in (ELSEWHERE, engine.device.split(":")[0]):
        problem = f"{devices}; but the engine runs on {engine.device}"
        remedy = 'this torch cannot use the GPU: install a build of torch for it, or set device "cpu"'
        return CheckResult(name="devices", status="warning", found=problem, remedy=remedy, measured=measured)
    return CheckResult(name="devices", status="ok", found=devices, measured=measured)


def check_disk(data_dir: Path, checkpoint: Path, free_bytes: int | None = None) -> CheckResult:
    """Check that more checkpoints of the size of `checkpoint` fit on the disk."""
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    free = shutil.disk_usage(data_dir).free if free_bytes is None else free_bytes
    room = free // max(1, size)
    space = f"{free / 2**30:.1f} GiB free in {data_dir}, room for {room:,} checkpoints of {size / 2**20:.1f} MiB"
    measured = {"free_bytes": float(free), "checkpoint_bytes": float(size)}
    if room >= MANY_CHECKPOINTS:
        return CheckResult(name=DISK_SPACE, status="ok", found=space, measured=measured)
    remedy = "free some space, choose another data directory, or call `model.delete_checkpoints()` regularly"
    status: CheckStatus = "warning" if room >= FEWEST_CHECKPOINTS else "failure"
    return CheckResult(name=DISK_SPACE, status=status, found=space, remedy=remedy, measured=measured)
