"""Hooks of the documentation site (mkdocs.yml): links to what the site does not have lead to the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]*|(?:\.\./)*decisions/[^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Point links to decisions and to files outside of docs/ at `repo_url`; without one, keep only their text."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("docs/") and not path.startswith("docs/decisions/"):
            return link[0]
        return f"[{link[1]}]({config.repo_url}/blob/main/{path})" if config.repo_url else link[1]

    return _LINK.sub(replaced, markdown)
