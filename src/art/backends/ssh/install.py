"""`Install`: what is installed on another machine, and where.

By default that is what this process runs: the same release from the package index, or, if ART was installed here from a
folder or a wheel, that folder or wheel, which is sent over.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from art.errors import ConfigError

PACKAGE = "agent-reinforcement-trainer"
_PARTS_OF_SOURCE = ("pyproject.toml", "README.md", "LICENSE", "src")
"""What pip needs of a checkout to build ART."""


@dataclass(frozen=True, slots=True)
class Install:
    """What is installed on another machine, and where."""

    source: str | Path | None = None
    """`"index"` for the release of this version; `"installed"` for what is there already; a wheel or a folder of ART's
    source on this machine; anything else is what pip is asked for, such as `agent-reinforcement-trainer[local]==0.1.0`.
    `None`: what this process runs."""
    extras: tuple[str, ...] = ("local",)
    """Optional parts of ART, such as `("local", "vllm")`."""
    index_url: str | None = None
    """Package index in place of the one that pip is configured for there. It may contain a password."""
    python: str | None = None
    """Python 3.11 or newer of the other machine, a name or a path. By default the first one that is found."""
    folder: str | None = None
    """Folder of the server on the other machine, for its environment, settings and data; absolute, or beginning with
    `~/`. By default `~/.art/servers/NAME`."""
    timeout_s: float = 3600.0
    """Seconds that the installation may take."""


@dataclass(frozen=True, slots=True)
class Package:
    """What is sent to the other machine to be installed there."""

    target: str
    """What pip is asked for: a requirement, or a path in the server's folder."""
    digest: str
    """Changes with everything that makes a new installation necessary. Empty if anything that is installed will do."""
    file: tuple[str, bytes] | None
    """Name in the server's folder, and content, of the file that is sent over first."""

    def describe(self) -> str:
        if self.file is None:
            return self.target
        return f"ART from this machine ({len(self.file[1]) / 1e6:.1f} MB)"


def make_package(install: Install) -> Package:
    """Read or pack what `install` names.

    Raises:
        ConfigError: the source is a path where there is no wheel and no source of ART, or a setting is malformed.
    """
    if wrong := [extra for extra in install.extras if not re.fullmatch(r"[A-Za-z0-9-]+", extra)]:
        raise ConfigError(f'extras are names like "local", got {wrong[0]!r}', param="extras")
    if install.index_url is not None and not re.fullmatch(r"(https?|file)://\S+", install.index_url):
        raise ConfigError("index_url must be an address like https://host/simple", param="index_url")
    extras = f"[{','.join(install.extras)}]" if install.extras else ""
    source = _own_source() if install.source is None else install.source
    if source == "installed":
        return Package("", "", None)
    if source == "index":
        source = f"{PACKAGE}{extras}=={importlib.metadata.version(PACKAGE)}"
    path = Path(source).expanduser()
    if path.suffix == ".whl" and path.is_file():
        content, name = path.read_bytes(), path.name
        target = f"./{name}{extras}"
    elif (path / "pyproject.toml").is_file():
        content, name = _pack_source(path), "source.tar"
        target = f"./source{extras}"
    elif isinstance(source, Path) or "/" in source or "\\" in source:
        raise ConfigError(f"there is no wheel and no source of ART at {str(source)!r}", param="source")
    else:
        return Package(source, _digest(source, b""), None)
    return Package(target, _digest(target, content), (name, content))


def _digest(target: str, content: bytes) -> str:
    return hashlib.sha256(target.encode() + b"\0" + content).hexdigest()


def _own_source() -> str | Path:
    """The folder or wheel that the ART of this process came from; `"index"` if it came from a package index."""
    checkout = Path(__file__).parents[4]
    if (checkout / "pyproject.toml").is_file() and PACKAGE in (checkout / "pyproject.toml").read_text(encoding="utf-8"):
        return checkout
    try:
        origin = importlib.metadata.distribution(PACKAGE).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    url = urlsplit(json.loads(origin)["url"] if origin else "")
    path = Path(url2pathname(url.path))
    return path if url.scheme == "file" and path.exists() else "index"


def _pack_source(folder: Path) -> bytes:
    """Pack ART's source, such that the same files always give the same bytes.

    Raises:
        ConfigError: a part is missing, so the folder is no checkout of ART.
    """
    paths: list[Path] = []
    for part in _PARTS_OF_SOURCE:
        path = folder / part
        if not path.exists():
            raise ConfigError(f"{folder} is no source of ART: there is no {part} in it", param="source")
        paths += [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:") as files:
        for path in paths:
            if "__pycache__" not in path.parts:
                entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
                entry.size, entry.mode = path.stat().st_size, 0o600
                with path.open("rb") as content:
                    files.addfile(entry, content)
    return packed.getvalue()
