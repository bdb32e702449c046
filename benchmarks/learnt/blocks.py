"""Blocks of pages that are made from results, between two comments:

<!-- learnt tic_tac_toe -->
what is here is replaced
<!-- /learnt -->
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
Render = Callable[[Path, str | None], str]
"""Returns the inside of a block from the page that it is in and the word after the kind."""


def pages() -> list[Path]:
    """The pages that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def renewed(text: str, page: Path, kind: str, render: Render) -> str:
    """Return the text of a page with its blocks of a kind made again."""
    block = re.compile(rf"(<!-- {kind}(?: (\S+))? -->\n).*?(<!-- /{kind} -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}\n{render(page, match[2])}\n{match[3]}", text)


def renew_pages(kind: str, render: Render) -> list[Path]:
    """Write every page whose blocks of a kind have changed, and return those."""
    changed = []
    for page in pages():
        text = page.read_text()
        if (new := renewed(text, page, kind, render)) != text:
            page.write_text(new)
            changed.append(page)
    return changed


def relative(target: Path, page: Path) -> str:
    """Return the link from a page to a file."""
    return Path(os.path.relpath(target, page.parent)).as_posix()
