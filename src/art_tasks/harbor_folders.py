"""Task directories: Harbor's layout, or a plain folder. One is read, and refused if it has what would have no effect.

instruction.md      what the agent is asked to do
task.toml           time limits, resources, variables
environment/        a Dockerfile and the files that it copies, unless task.toml names an image
tests/test.sh       writes the reward to /logs/verifier/reward.txt or reward.json
solution/solve.sh   a solution; only the scripted player sees it

A plain folder is enough where one image does for all tasks:

task.toml           as above, with the `instruction`; the image is `PLAIN_IMAGE` unless it names another
files/              what the agent finds in /app
check.sh            exits with 0 if it is done; may write a reward as above
solve.sh            a solution
"""

from __future__ import annotations

import io
import re
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from art.config.base import describe_invalid
from art.errors import ConfigError

PLAIN_IMAGE = "docker.io/library/python:3.12-slim"
"""Image of a plain folder."""
PLAIN_WORKDIR = "/app"
INSTEAD = "Let Harbor run this one and point its agent at ART's address: docs/rollouts.md"
_FETCHES = re.compile(
    r"\b(apt-get|apt|apk|yum|dnf)\s+(-\S+\s+)*(install|add|update)|\b(uvx|npx)\b|\buv\s+(pip|tool|add|sync)\b"
    r"|\bpip3?\s+install|\bnpm\s+(i|ci|install)\b|\b(curl|wget)\b[^\n]*https?://(?!localhost|127\.)"
)
"""Commands that take something from the network."""
_UNITS = {"": 1, "M": 1, "MB": 1, "MI": 1, "MIB": 1, "G": 1024, "GB": 1024, "GI": 1024, "GIB": 1024}


def _megabytes(value: Any) -> int:
    """The size in MB, from `memory_mb = 2048` or the older `memory = "2G"`."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", str(value))
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f'a size must be like 2048 or "2G", got {value!r}')
    return int(match[1]) * _UNITS[match[2].upper()]


def _fixed(env: dict[str, str]) -> dict[str, str]:
    if any("${" in value for value in env.values()):
        raise ValueError("`env` must have fixed values; the user's environment is not given to tasks")
    return env


Megabytes = Annotated[int | None, BeforeValidator(_megabytes)]
Seconds = Annotated[float, Field(gt=0, strict=True)]
Variables = Annotated[dict[str, str], AfterValidator(_fixed)]


class _Section(BaseModel):
    """A section of task.toml. It refuses what would have no effect here."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class EnvironmentSection(_Section):
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    """Without one, the Dockerfile of `environment` is built."""
    workdir: str | None = None
    """Folder in which commands start. `None` means the folder that the image names."""
    cpus: float | None = None
    memory_mb: Megabytes = Field(default=None, validation_alias=AliasChoices("memory_mb", "memory"))
    storage_mb: Megabytes = Field(default=None, validation_alias=AliasChoices("storage_mb", "storage"))
    env: Variables = {}
    os: Literal["linux"] = "linux"
    gpus: Literal[0] = 0
    allow_internet: Literal[False] = False
    network_mode: Literal["no-network"] = "no-network"


class AgentSection(_Section):
    timeout_sec: Seconds = 600.0
    user: Literal["root", "0", 0] = "root"


class VerifierSection(AgentSection):
    env: Variables = {}
    environment_mode: Literal["shared"] = "shared"


class SolutionSection(BaseModel):
    env: Variables = {}


class TaskToml(_Section):
    """The content of task.toml."""

    model_config = ConfigDict(title="task.toml")

    instruction: str | None = None
    """What the agent is asked to do, where there is no instruction.md."""
    environment: EnvironmentSection = EnvironmentSection()
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    solution: SolutionSection = SolutionSection()
    version: Any = None
    schema_version: Any = None
    task: Any = None
    metadata: Any = None
    source: Any = None
    artifacts: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFolder:
    """A task directory that can be done here."""

    path: Path
    instruction: str
    settings: TaskToml

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_plain(self) -> bool:
        return (self.path / "check.sh").is_file()

    def files(self) -> bytes | None:
        """What a plain folder puts into the container at its start."""
        folder, workdir = self.path / "files", self.settings.environment.workdir
        return _pack(folder, str(workdir).strip("/")) if self.is_plain and folder.is_dir() else None

    def tests(self) -> bytes:
        """The tests below /tests."""
        return _pack(self.path / "check.sh", "tests/test.sh") if self.is_plain else _pack(self.path / "tests", "tests")

    def solution(self) -> bytes:
        """The solution's files below /solution.

        Raises:
            ConfigError: the task has no solve.sh.
        """
        solve = self.path / ("solve.sh" if self.is_plain else "solution/solve.sh")
        if not solve.is_file():
            raise ConfigError(f"{self.path} has no {solve.relative_to(self.path)}, so it has no scripted player")
        return _pack(solve, "solution/solve.sh") if self.is_plain else _pack(solve.parent, "solution")


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
    try:
        settings = TaskToml.model_validate(tomllib.loads((path / "task.toml").read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ConfigError(
            f"{path}/task.toml: {describe_invalid(error)}. Commands here run in one container with Linux, as root, "
            f"without network and GPUs. {INSTEAD}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}/task.toml cannot be read: {error}") from error
    if files := [file.name for file in (path / "environment").glob("*compose*.y*ml")]:
        raise ConfigError(f"{path}/environment/{files[0]} asks for several containers. {INSTEAD}")
    is_plain = (path / "check.sh").is_file()
    instruction, test = path / "instruction.md", path / ("check.sh" if is_plain else "tests/test.sh")
    for file in (instruction, test):
        if not file.is_file() and (file == test or settings.instruction is None):
            raise ConfigError(f"{path} has no {file.relative_to(path)}")
    if instruction.is_file() and settings.instruction is not None:
        raise ConfigError(f"{path} has two instructions: instruction.md, and `instruction` in task.toml")
    for number, line in enumerate(test.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.lstrip().startswith("#") and (match := _FETCHES.search(line)):
            raise ConfigError(
                f"{test}, line {number}: {line.strip()[:200]}\n`{match[0].strip()}` takes something from the network, "
                f"and commands here have none. Let the Dockerfile install what the tests need. {INSTEAD}"
            )
    environment = settings.environment
    if environment.docker_image is None and not (path / "environment" / "Dockerfile").is_file():
        if not is_plain:
            raise ConfigError(f"{path} has no environment/Dockerfile, and its task.toml names no `docker_image`")
        environment = environment.model_copy(update={"docker_image": PLAIN_IMAGE})
    if is_plain:
        environment = environment.model_copy(update={"workdir": environment.workdir or PLAIN_WORKDIR})
    return TaskFolder(
        path=path, instruction=settings.instruction or instruction.read_text(encoding="utf-8").strip(),
        settings=settings.model_copy(update={"environment": environment}),
    )  # fmt: skip


def _pack(path: Path, name: str) -> bytes:
    """Pack a file or folder, by this name below the root, into a tar archive whose files belong to root."""

    def belong_to_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(path, arcname=name, filter=belong_to_root)
    return packed.getvalue()
