"""Markdown from docstrings and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
_ITEM = re.compile(r"(\S[^:]*): +(.*)$")


def header(title: str, introduction: str) -> str:
    """Open a generated page. The comment says how to renew it."""
    return f"# {title}\n\n<!-- Made by `python -m tools.pages`; a test compares. -->\n\n{introduction.strip()}\n\n"


def table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Write a table. Cells are Markdown already; their line breaks become spaces."""
    lines = [headings, tuple("---" for _ in headings), *(tuple(map(_cell, row)) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def escaped(text: str) -> str:
    """Escape `<`, `*` and brackets outside of code, which Markdown would take as markup."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"[*\[\]]", r"\\\g<0>", part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


def prose(docstring: str) -> str:
    """Turn a docstring into Markdown: paragraphs, indented blocks as text fences, `Args:` and `Raises:` as lists."""
    blocks = re.split(r"\n\s*\n", docstring.strip("\n"))
    return "\n\n".join(_block(block) for block in blocks if block.strip())


def _block(block: str) -> str:
    lines = block.split("\n")
    if _SECTION.match(lines[0].strip()):
        return f"*{lines[0].strip()[:-1]}*\n\n{_items(lines[1:])}"
    if all(line.startswith("    ") for line in lines):
        text = "\n".join(line[4:] for line in lines)
        return f"```text\n{text}\n```"
    return escaped("\n".join(line.strip() for line in lines))


def _items(lines: list[str]) -> str:
    """Turn the indented lines of a section into a list; deeper lines continue the item above."""
    items: list[str] = []
    for line in lines:
        text = line.strip()
        if items and line.startswith("        "):
            items[-1] += f" {text}"
        else:
            items.append(text)
    named = [_ITEM.match(item) for item in items]
    return "\n".join(
        f"- `{match[1]}`: {escaped(match[2])}" if match else f"- {escaped(item)}"
        for item, match in zip(items, named, strict=True)
    )
