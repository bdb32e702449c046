"""Hooks of the documentation site (mkdocs.yml): links to what the site does not have lead to the repository.

Language models get the pages as text: `llms.txt` lists them, `llms-full.txt` has them all, and each page lies beside
its HTML as Markdown.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]*|(?:\.\./)*decisions/[^)\s]*)\)")
_ANY_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_NO_PROSE = ("#", "<", "|", "```", ":::", "![", "    ", "- ")
"""What a paragraph that is no sentence begins with."""


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Point links to decisions and to files outside of docs/ at `repo_url`; without one, keep only their text."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("docs/") and not path.startswith("docs/decisions/"):
            return link[0]
        return f"[{link[1]}]({config.repo_url}/blob/main/{path})" if config.repo_url else link[1]

    return _LINK.sub(replaced, markdown)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write `llms.txt`, `llms-full.txt` and the Markdown of each page of the navigation into the site."""
    site, listing = Path(config.site_dir), [f"# {config.site_name}", f"> {config.site_description}"]
    whole = list(listing)
    for section, entries in sections(config.nav):
        lines = []
        for title, source in entries:
            text = Path(config.docs_dir, source).read_text(encoding="utf-8")
            target = site / source
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            about = first_sentence(text)
            lines.append(f"- [{title or heading(text)}]({config.site_url or ''}{source}){about and f': {about}'}")
            whole.append(f"<!-- {source} -->\n\n{text.strip()}")
        listing.append(f"## {section}\n\n" + "\n".join(lines))
    for name, parts in (("llms.txt", listing), ("llms-full.txt", whole)):
        (site / name).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def sections(nav: list[Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each section of the navigation with title and file of its pages, those of sections inside it too. A page
    without a title has an empty one."""
    for entry in nav:
        ((title, below),) = entry.items() if isinstance(entry, dict) else (("", entry),)
        yield title, list(_pages(title, below))


def _pages(title: str, below: Any) -> Iterator[tuple[str, str]]:
    if isinstance(below, str):
        yield title, below
        return
    for entry in below:
        yield from _pages(*next(iter(entry.items()))) if isinstance(entry, dict) else _pages("", entry)


def heading(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("# ")).removeprefix("# ")


def first_sentence(text: str) -> str:
    """Return the first sentence of a page, without its links; empty if the page begins with no sentence."""
    for paragraph in re.split(r"\n\s*\n", text):
        if not paragraph.startswith(_NO_PROSE):
            words = _ANY_LINK.sub(r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.!?])\s", words)[0].rstrip(":")
    return ""
