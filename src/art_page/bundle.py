"""The files of the page as a browser gets them: one document, one script, one style sheet and the icon.

The sources are ES modules and style sheets below `static/`, which need no build step: they are joined when the first
browser asks. A page of a hundred modules would cost a request for each, and a browser loads no modules from `file://`,
where exported copies lie.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

INDEX, SCRIPT, STYLE = "index.html", "page.js", "page.css"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml", ".LICENSE": "text/plain; charset=utf-8",
}  # fmt: skip
MAIN, CHART, LICENSE = "main.js", "vendor/uPlot.iife.min.js", "vendor/uPlot.LICENSE"
_IMPORT = re.compile(r'^import (\{ .+ \}) from "(.+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)
_LINK = re.compile(r'<link rel="stylesheet" href="([\w./]+)">\n')
_TAG = re.compile(r'<script src="[\w./]+" (?:defer|type="module")></script>\n')


@dataclass(frozen=True, slots=True)
class PageFiles:
    """The files that a browser gets."""

    index: str
    """The document. It names the other files without their folder."""
    content: Mapping[str, bytes]
    """Content of the other files by name."""
    packed: Mapping[str, bytes]
    """The gzipped content of these files by name."""
    version: str
    """Digest of all of them. It is part of their addresses, so browsers may keep them for ever."""

    def document(self, folder: str) -> str:
        """Return the document with the address of each file that it names."""
        return re.sub(r'\b(href|src)="(page\.\w+|icon\.svg)"', rf'\1="{folder}\2"', self.index)


@functools.cache
def page_files() -> PageFiles:
    """Read the sources from the package, and join them."""
    sources = read_sources()
    index = sources[INDEX].decode()
    styles = _LINK.findall(index)
    index = _LINK.sub("", _TAG.sub("", index)).replace(
        "</head>", f'<link rel="stylesheet" href="{STYLE}">\n<script src="{SCRIPT}" defer></script>\n</head>'
    )
    content = {
        SCRIPT: sources[CHART] + b"\n" + join_modules({name: data.decode() for name, data in sources.items()}).encode(),
        STYLE: b"\n".join(sources[name] for name in styles),
        "icon.svg": sources["icon.svg"],
        posixpath.basename(LICENSE): sources[LICENSE],
    }
    digest = hashlib.sha256(index.encode())
    for name, data in content.items():
        digest.update(f"{name}\n{len(data)}\n".encode() + data)
    packed = {name: gzip.compress(data, mtime=0) for name, data in content.items()}
    return PageFiles(index, content, packed, digest.hexdigest()[:16])


def read_sources() -> dict[str, bytes]:
    """Return all files of the package's folder, by their path in it."""

    def read(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
        entries: list[tuple[str, bytes]] = []
        for entry in folder.iterdir():
            if entry.is_dir():
                entries += read(entry, f"{prefix}{entry.name}/")
            elif any(entry.name.endswith(suffix) for suffix in CONTENT_TYPES):
                entries.append((prefix + entry.name, entry.read_bytes()))
        return entries

    return dict(sorted(read(files("art_page").joinpath("static"), "")))


def join_modules(sources: Mapping[str, str], main: str = MAIN) -> str:
    """Join the module `main` and all that it imports to one classic script.

    Each module becomes a function that is called once and returns what the module exports, so names of two modules
    cannot clash. The modules keep to a few forms of imports and exports, which a test checks.

    Raises:
        ValueError: modules import each other in a circle, or a module imports one that is not there.
    """
    variables: dict[str, str] = {}  # of the modules so far, each after all that it imports
    parts: list[str] = []

    def add(name: str, above: tuple[str, ...]) -> str:
        if name in above or name not in sources:
            problem = "imports itself" if name in above else "is not there"
            raise ValueError(f"the page's module {name} {problem}: {' -> '.join((*above, name))}")
        if name not in variables:
            folder = posixpath.dirname(name)
            text = _IMPORT.sub(
                lambda found: (
                    f"const {found[1].replace(' as ', ': ')} = "
                    f"{add(posixpath.normpath(posixpath.join(folder, found[2])), (*above, name))};"
                ),
                sources[name],
            )
            exported = ", ".join(found[2] for found in _EXPORT.finditer(text))
            variables[name] = f"module{len(variables)}"
            body = _EXPORT.sub(r"\1 \2", text)
            parts.append(f"// {name}\nconst {variables[name]} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n")
        return variables[name]

    add(main, ())
    return '"use strict";\n(() => {\n' + "".join(parts) + "})();\n"
