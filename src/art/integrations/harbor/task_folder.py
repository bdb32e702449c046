"""Reads a task directory of Harbor, and refuses what would have no effect here.

instruction.md      what the agent is asked to do
task.toml           time limits, resources, variables
environment/        a Dockerfile and the files that it copies, unless task.toml names an image
tests/test.sh       writes the reward to /logs/verifier/reward.txt or reward.json
solution/solve.sh   a solution; only the scripted player sees it
"""

from __future__ import annotations

import io
import re
import tarfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.errors import ConfigError

BUILD_TIMEOUT_S = 600.0
AGENT_TIMEOUT_S = 600.0
VERIFIER_TIMEOUT_S = 600.0
"""Time limits of a task.toml without them."""
INSTEAD = "Let Harbor run this one and point its agent at ART's address: docs/rollouts.md"
_ENVIRONMENT = {
    "build_timeout_sec", "cpus", "memory_mb", "storage_mb", "memory", "storage", "env", "workdir", "os", "gpus",
    "allow_internet", "network_mode", "docker_image",
}  # fmt: skip
_AGENT = {"timeout_sec", "user"}
_VERIFIER = {"timeout_sec", "user", "env", "environment_mode"}
_TOP = {
    "version", "schema_version", "task", "metadata", "source", "environment", "agent", "verifier", "solution",
    "artifacts",
}  # fmt: skip
_FETCHES = re.compile(
    r"\b(apt-get|apt|apk|yum|dnf)\s+(-\S+\s+)*(install|add|update)|\b(uvx|npx)\b|\buv\s+(pip|tool|add|sync)\b"
    r"|\bpip3?\s+install|\bnpm\s+(i|ci|install)\b|\b(curl|wget)\b[^\n]*https?://(?!localhost|127\.)"
)
"""Commands that take something from the network."""
_UNITS = {"": 1, "M": 1, "MB": 1, "MI": 1, "MIB": 1, "G": 1024, "GB": 1024, "GI": 1024, "GIB": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFolder:
    """A task directory that can be done here."""

    path: Path
    instruction: str
    image: str | None
    """The image that its `task.toml` names. Without one, the Dockerfile of `environment` is built."""
    workdir: str | None
    """The folder that its `task.toml` names. Without one, it is that of the image."""
    env: dict[str, str]
    build_timeout_s: float
    agent_timeout_s: float
    verifier_timeout_s: float
    verifier_env: dict[str, str]
    solution_env: dict[str, str]
    memory_mb: int | None
    storage_mb: int | None
    cpus: float | None

    @property
    def name(self) -> str:
        return self.path.name

    def tests(self) -> bytes:
        return _pack(self.path / "tests")

    def solution(self) -> bytes:
        """The solution's files below /solution.

        Raises:
            ConfigError: the task has no `solution/solve.sh`.
        """
        if not (self.path / "solution" / "solve.sh").is_file():
            raise ConfigError(f"{self.path} has no solution/solve.sh, so it has no scripted player")
        return _pack(self.path / "solution")


def find_folders(path: Path) -> list[TaskFolder]:
    """Read a task directory, or all that lie directly in a folder, sorted by name.

    Raises:
        ConfigError: there is none, or one cannot be done here.
    """
    if (path / "task.toml").is_file():
        return [read_folder(path)]
    folders = sorted(toml.parent for toml in path.glob("*/task.toml")) if path.is_dir() else []
    if not folders:
        raise ConfigError(f"{path} is no task directory of Harbor, and contains none: there is no task.toml")
    return [read_folder(folder) for folder in folders]


def read_folder(path: Path) -> TaskFolder:
    """Read one task directory.

    Raises:
        ConfigError: a file is missing or wrong, or asks for what does not exist here.
    """
    settings = _read_toml(path / "task.toml")
    _check_keys(path, settings)
    environment, agent, verifier = (_section(path, settings, name) for name in ("environment", "agent", "verifier"))
    instruction, test = path / "instruction.md", path / "tests" / "test.sh"
    for file in (instruction, test):
        if not file.is_file():
            raise ConfigError(f"{path} has no {file.relative_to(path)}")
    _check_fetches(test)
    image, workdir, cpus = (environment.get(key) for key in ("docker_image", "workdir", "cpus"))
    if image is None and not (path / "environment" / "Dockerfile").is_file():
        raise ConfigError(f"{path} has no environment/Dockerfile, and its task.toml names no `docker_image`")
    return TaskFolder(
        path=path, instruction=instruction.read_text(encoding="utf-8").strip(),
        image=image and str(image), workdir=workdir and str(workdir), cpus=cpus and float(cpus),
        env=_variables(path, "environment", environment),
        build_timeout_s=_seconds(path, "environment", environment, BUILD_TIMEOUT_S, "build_timeout_sec"),
        agent_timeout_s=_seconds(path, "agent", agent, AGENT_TIMEOUT_S),
        verifier_timeout_s=_seconds(path, "verifier", verifier, VERIFIER_TIMEOUT_S),
        verifier_env=_variables(path, "verifier", verifier),
        solution_env=_variables(path, "solution", _section(path, settings, "solution")),
        memory_mb=_megabytes(path, environment, "memory"),
        storage_mb=_megabytes(path, environment, "storage"),
    )  # fmt: skip


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _section(path: Path, settings: dict[str, Any], name: str) -> dict[str, Any]:
    section = settings.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{path}/task.toml: [{name}] must be a table, got {section!r}")
    return section


def _check_keys(path: Path, settings: dict[str, Any]) -> None:
    """Refuse settings that would have no effect here."""
    for name, known in (("environment", _ENVIRONMENT), ("agent", _AGENT), ("verifier", _VERIFIER)):
        _refuse(path, (f"[{name}] {key}" for key in _section(path, settings, name).keys() - known))
    _refuse(path, settings.keys() - _TOP)
    environment, verifier = _section(path, settings, "environment"), _section(path, settings, "verifier")
    wants_network = environment.get("allow_internet") or environment.get("network_mode", "no-network") != "no-network"
    if wants_network:
        raise ConfigError(
            f"{path}/task.toml asks for the internet, and commands here have no network. If the task does not need "
            f"it, set `allow_internet = false` in [environment]. {INSTEAD}"
        )
    if environment.get("gpus") or environment.get("os", "linux") != "linux":
        raise ConfigError(f"{path}/task.toml asks for GPUs or another system than Linux. {INSTEAD}")
    users = {str(_section(path, settings, name).get("user", "root")) for name in ("agent", "verifier")}
    if verifier.get("environment_mode", "shared") != "shared" or not users <= {"root", "0"}:
        raise ConfigError(f"{path}/task.toml asks for another user or a separate verifier. {INSTEAD}")
    if files := [file.name for file in (path / "environment").glob("*compose*.y*ml")]:
        raise ConfigError(f"{path}/environment/{files[0]} asks for several containers. {INSTEAD}")


def _refuse(path: Path, keys: Iterable[str]) -> None:
    if listed := sorted(keys):
        raise ConfigError(f"{path}/task.toml: {', '.join(listed)} has no effect here. {INSTEAD}")


def _check_fetches(test: Path) -> None:
    for number, line in enumerate(test.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.lstrip().startswith("#") and (match := _FETCHES.search(line)):
            raise ConfigError(
                f"{test}, line {number}: {line.strip()[:200]}\n`{match[0].strip()}` takes something from the network, "
                f"and commands here have none. Let the Dockerfile install what the tests need. {INSTEAD}"
            )


def _variables(path: Path, name: str, section: dict[str, Any]) -> dict[str, str]:
    env = section.get("env", {})
    if not isinstance(env, dict) or any("${" in str(value) for value in env.values()):
        raise ConfigError(
            f"{path}/task.toml: [{name}] env must have fixed values; the user's environment is not given to tasks"
        )
    return {str(key): str(value) for key, value in env.items()}


def _seconds(path: Path, name: str, section: dict[str, Any], default: float, key: str = "timeout_sec") -> float:
    value = section.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{path}/task.toml: [{name}] {key} must be a number of seconds above 0, got {value!r}")
    return float(value)


def _megabytes(path: Path, section: dict[str, Any], name: str) -> int | None:
    """The size in MB, from `memory_mb = 2048` or the older `memory = "2G"`."""
    value = section.get(f"{name}_mb", section.get(name))
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", str(value))
    if value is None:
        return None
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f'{path}/task.toml: {name} must be a size such as 2048 or "2G", got {value!r}')
    return int(match[1]) * _UNITS[match[2].upper()]


def _pack(folder: Path) -> bytes:
    """Pack a folder, as one at the root, into a tar archive whose files belong to root."""

    def belong_to_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, arcname=folder.name, filter=belong_to_root)
    return packed.getvalue()
