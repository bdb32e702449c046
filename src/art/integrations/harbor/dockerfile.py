"""Reads a Dockerfile that only chooses a base, a working directory and files, which can be followed without containers.

    FROM debian:12-slim          the system's own programs replace the base image
    WORKDIR /app
    ENV MODE=test
    COPY data/ /app/data/        files of the folder `environment`

Every other instruction that changes what a task finds is refused with its line.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from art.errors import ConfigError

PLAIN_BASES = ("debian", "ubuntu", "buildpack-deps", "bash", "scratch")
"""Base images without programs that the machine would lack."""
INSTEAD = (
    "ART runs Harbor tasks without containers. Run this one with Harbor itself (or by verifiers, which runs Harbor's "
    "containers) and point its agent at ART's address: docs/rollouts.md"
)
_WITHOUT_EFFECT = {"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK"}
"""Instructions about how a container is started or described; Harbor starts it in its own way too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What a task finds at its start."""

    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    files: list[tuple[Path, str]] = field(default_factory=list)
    """Files and folders of this machine, each with its absolute path in the sandbox."""


def read_dockerfile(path: Path) -> Image:
    """Read a Dockerfile, whose folder is the context of its build.

    Raises:
        ConfigError: it needs a container; the message has the instruction and its line.
    """
    workdir, env, files = "/", dict[str, str](), list[tuple[Path, str]]()
    for number, line in _instructions(path.read_text(encoding="utf-8")):
        name, _, rest = line.partition(" ")
        where, name, rest = f"{path}, line {number}: {line[:200]}", name.upper(), rest.strip()
        if "$" in rest and name not in _WITHOUT_EFFECT:
            raise ConfigError(f"{where}\nuses a variable, which needs a build. {INSTEAD}")
        if name == "FROM":
            _check_base(rest, where)
        elif name == "WORKDIR":
            workdir = str(PurePosixPath(workdir, rest.strip("\"'")))
        elif name == "ENV":
            env |= _variables(rest, where)
        elif name == "COPY":
            files += _copies(rest, path.parent, workdir, where)
        elif name == "USER" and rest in ("root", "0"):
            pass
        elif name not in _WITHOUT_EFFECT:
            raise ConfigError(f"{where}\nneeds a container. {INSTEAD}")
    return Image(workdir=workdir, env=env, files=files)


def _instructions(text: str) -> list[tuple[int, str]]:
    """The instructions with the number of their first line, without comments, continued lines joined."""
    joined: list[tuple[int, str]] = []
    parts: list[str] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if not parts:
            first = number
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            joined.append((first, " ".join(parts)))
            parts = []
    return [*joined, *([(first, " ".join(parts))] if parts else [])]


def _check_base(rest: str, where: str) -> None:
    image = rest.split()[0] if rest else ""
    name, _, tag = image.rpartition("/")[2].partition("@")[0].partition(":")
    if image != rest or "--platform" in rest:
        raise ConfigError(f"{where}\nhas several stages or a platform, which needs a build. {INSTEAD}")
    if name == "python":
        _check_python(tag, where)
    elif name not in PLAIN_BASES:
        raise ConfigError(
            f"{where}\nthe image brings programs of its own. Without containers the system's programs take its place, "
            f"which is possible for {', '.join(PLAIN_BASES)} and python. {INSTEAD}"
        )


def _check_python(tag: str, where: str) -> None:
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    asked = match[0] if (match := re.match(r"3(\.\d+)?", tag)) else ""
    shown = "none in /usr"
    if python is not None:
        shown = subprocess.run([python, "--version"], capture_output=True, text=True, check=False).stdout.split()[-1]
    if python is None or not f"{shown}.".startswith(f"{asked}." if asked else ""):
        raise ConfigError(f"{where}\nneeds Python {asked or '3'}, and this system has {shown}. {INSTEAD}")


def _variables(rest: str, where: str) -> dict[str, str]:
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ConfigError(f"{where}\ncannot be read: {error}") from None
    if words and "=" not in words[0]:  # the older form: ENV NAME value
        return {words[0]: " ".join(words[1:])}
    return dict(word.partition("=")[::2] for word in words)


def _copies(rest: str, context: Path, workdir: str, where: str) -> list[tuple[Path, str]]:
    words = shlex.split(rest) if not rest.startswith("[") else [word.strip(" \"'") for word in rest[1:-1].split(",")]
    if len(words) < 2 or any(word.startswith("--") for word in words):
        raise ConfigError(f"{where}\nonly COPY of files of the folder is followed, without options. {INSTEAD}")
    *patterns, target = words
    destination = PurePosixPath(workdir, target)
    sources = [source for pattern in patterns for source in _sources(pattern, context, where)]
    into = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
    copies: list[tuple[Path, str]] = []
    for source in sources:
        if source.is_dir():  # the content of a folder is copied, not the folder
            copies += [(child, str(destination / child.name)) for child in sorted(source.iterdir())]
        else:
            copies.append((source, str(destination / source.name if into else destination)))
    if (context / ".dockerignore").exists() and any(source.is_dir() for source in sources):
        raise ConfigError(f"{where}\nthe folder has a .dockerignore, which is not followed; name the files in COPY")
    return copies


def _sources(pattern: str, context: Path, where: str) -> list[Path]:
    pattern = pattern.lstrip("/")
    sources = [context] if pattern in ("", ".", "./") else sorted(context.glob(pattern.removeprefix("./")))
    root = context.resolve()
    if not sources or not all(path.resolve().is_relative_to(root) for path in sources):
        raise ConfigError(f"{where}\nthere is no {pattern!r} in {context}")
    return sources
