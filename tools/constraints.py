"""Write constraints.txt: the exact versions of this environment, for all that the extras local, dev and docs bring.

python -m tools.constraints > constraints.txt
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("local", "dev", "docs")
_HEADER = f"""\
# Versions that the tests passed with, for a build that can be repeated:
#     pip install --constraint constraints.txt --editable '.[local,dev]'
# Made by `python -m tools.constraints` from an environment with the extras {", ".join(EXTRAS)}.
"""


def requirements(extras: tuple[str, ...] = EXTRAS) -> list[Requirement]:
    """Read what pyproject.toml asks for, with `extras`."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    return [Requirement(text) for text in texts]


def installed_versions(needed: Iterable[Requirement]) -> dict[str, str]:
    """Map each distribution that `needed` brings to its installed version. One that is not installed is left out."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    pending = [(canonicalize_name(each.name), extra) for each in needed for extra in ("", *each.extras)]
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        versions[name] = Version(distribution.version).public  # without the local part, as in 2.13.0+cpu
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                pending += [(canonicalize_name(requirement.name), each) for each in ("", *requirement.extras)]
    return versions


def main() -> None:
    pins = sorted(installed_versions(requirements()).items())
    sys.stdout.write(_HEADER + "".join(f"{name}=={version}\n" for name, version in pins))


if __name__ == "__main__":
    main()
