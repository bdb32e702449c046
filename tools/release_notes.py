"""Print the notes of a release from CHANGELOG.md, after checking that the tag is the version of the source.

python -m tools.release_notes v0.2.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version_of_source() -> str:
    """Read the version from `src/art/__init__.py` without importing it: a release job has no dependencies."""
    source = (ROOT / "src/art/__init__.py").read_text()
    return str(re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0])


def release_notes(tag: str, changelog: str, version: str) -> str:
    """Return the section of `changelog` for `tag`.

    Raises:
        ValueError: the tag is not the version of the source, or the changelog has no text for it.
    """
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag} and the source says {version}: change `__version__` or the tag")
    sections = re.split(r"^## \[(.+?)\].*$", changelog, flags=re.MULTILINE)
    notes = dict(zip(sections[1::2], sections[2::2], strict=True)).get(version, "").strip()
    if not notes:
        raise ValueError(f"CHANGELOG.md has no section [{version}]: rename [Unreleased] to [{version}] with the date")
    return f"{notes}\n"


if __name__ == "__main__":
    try:
        sys.stdout.write(release_notes(sys.argv[1], (ROOT / "CHANGELOG.md").read_text(), version_of_source()))
    except ValueError as error:
        sys.exit(f"release_notes: {error}")
