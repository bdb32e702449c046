"""The files of the page, which are part of the package: `index.html`, modules, styles, and the vendored chart library.

They are listed once. Nothing that a request says becomes part of a path.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml", ".LICENSE": "text/plain; charset=utf-8",
}  # fmt: skip
_ADDRESS = re.compile(r'\b(href|src)="([\w./-]+)"')


@dataclass(frozen=True, slots=True)
class PageFiles:
    """The files of the page."""

    content: dict[str, bytes]
    """Content by the name relative to the page's folder, e.g. `lib/dom.js`."""
    version: str
    """Digest of all of them. It is part of their addresses, so browsers may keep them for ever."""

    def content_type(self, name: str) -> str:
        return CONTENT_TYPES[name[name.rindex(".") :]]

    def index(self, prefix: str) -> bytes:
        """Return the first page, with `prefix` before the address of each file that it names."""

        def address(match: re.Match[str]) -> str:
            name, target = match.groups()
            return f'{name}="{prefix}{target}"' if target in self.content else match[0]

        return _ADDRESS.sub(address, self.content[INDEX].decode()).encode()


@functools.cache
def page_files() -> PageFiles:
    """Read the files of the page from the package."""
    content = dict(sorted(_read(files("art.viewer").joinpath("static"), "")))
    digest = hashlib.sha256()
    for name, data in content.items():
        digest.update(f"{name}\n{len(data)}\n".encode() + data)
    return PageFiles(content, digest.hexdigest()[:16])


def _read(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    entries: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            entries += _read(entry, f"{prefix}{entry.name}/")
        elif any(entry.name.endswith(suffix) for suffix in CONTENT_TYPES):
            entries.append((prefix + entry.name, entry.read_bytes()))
    return entries
