"""The notebooks of examples/notebooks as cells, read without jupytext, and run like in Jupyter but in this process."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
_MARKER = re.compile(r"^# %%( \[markdown\])?(?: tags=\[(.*)\])?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    kind: str
    """`code` or `markdown`."""
    text: str
    tags: tuple[str, ...] = ()


def cells_of(source: Path) -> list[Cell]:
    """The cells of a `.py` file in the percent format."""
    parts = _MARKER.split(source.read_text())
    assert parts[0] == "", f"{source.name} has something before its first cell"
    cells = []
    for markdown, tags, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        text = body.strip("\n")
        if markdown:
            lines = text.split("\n")
            assert all(line == "#" or line.startswith("# ") for line in lines), f"{source.name}: {text[:60]!r}"
            text = "\n".join(line[2:] for line in lines)
        words = tuple(tag.strip(' "') for tag in (tags or "").split(",") if tag)
        cells.append(Cell(kind="markdown" if markdown else "code", text=text, tags=words))
    return cells


async def run_cells(source: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Run the code of a notebook in the event loop of the caller, with other values in its cell of settings.

    Returns:
        The notebook's names.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells_of(source)):
        if cell.kind == "code":
            where = f"{source.name}, cell {number}"
            result = eval(compile(cell.text, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if inspect.isawaitable(result):
                await result
        if "parameters" in cell.tags:
            names |= parameters
    return names
