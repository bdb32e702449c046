"""What `initialize_cluster` of older code takes: resources of SkyPilot, versions of ART, files of variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from art.backends.skypilot.sky_config import SkyConfig
from art.errors import ConfigError

_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*")


def read_environment(path: Path) -> dict[str, str]:
    """Read a file of lines `NAME=value`. Empty lines and those that begin with `#` are skipped; quotes are removed.

    Raises:
        ConfigError: there is no such file, or a line is none of these.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"env_path: cannot read {path}: {why}", param="env_path") from error
    values = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"env_path: line {number} of {path} is not NAME=value", param="env_path")
        name, value = match.groups()
        is_quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
        values[name] = value[1:-1] if is_quoted else value
    return values


def source_of_version(art_version: str) -> str | Path:
    """Return what to install for a version, or for a folder of ART's source.

    Raises:
        ConfigError: it is neither.
    """
    if re.fullmatch(r"\d+(\.\w+)+", art_version):
        return f"agent-reinforcement-trainer[local]=={art_version}"
    if Path(art_version).expanduser().is_dir():
        return Path(art_version)
    raise ConfigError(
        f"art_version is a version such as 0.1.0, or a folder of ART's source; got {art_version!r}", param="art_version"
    )


def read_resources(resources: Any) -> SkyConfig:
    """Make the settings that SkyPilot's resources mean. Ports are dropped: nothing is opened to the internet.

    Args:
        resources: fields by name, as in a task file; or a `sky.Resources`; or `None`.

    Raises:
        ConfigError: it is none of these, or has a field that ART does not take.
    """
    if resources is None:
        return SkyConfig()
    values = resources.to_yaml_config() if hasattr(resources, "to_yaml_config") else resources
    if not isinstance(values, dict):
        raise ConfigError(f"resources are fields by name, or a sky.Resources; got {resources!r}", param="resources")
    rest = {name: value for name, value in values.items() if value is not None and name != "ports"}
    infra = str(rest.pop("infra", "") or "/".join(str(rest.pop(n)) for n in ("cloud", "region") if n in rest))
    cloud, _, region = infra.partition("/")
    autostop = rest.pop("autostop", None)
    if autostop not in (None, False):
        raise ConfigError("resources.autostop is set by idle_minutes and on_idle of SkyConfig", param="resources")
    return SkyConfig(
        gpu=_gpu(rest.pop("accelerators", None)), cloud=cloud.lower() or None, region=region or None,
        spot=bool(rest.pop("use_spot", False)), disk_gb=rest.pop("disk_size", None), image=rest.pop("image_id", None),
        resources=rest,
    )  # fmt: skip


def _gpu(accelerators: Any) -> str | None:
    if isinstance(accelerators, dict) and len(accelerators) == 1:
        name, number = next(iter(accelerators.items()))
        return f"{name}:{number:g}" if number else str(name)
    if accelerators is None or isinstance(accelerators, str):
        return accelerators
    raise ConfigError(f"resources.accelerators is one kind with a number, got {accelerators!r}", param="resources")
