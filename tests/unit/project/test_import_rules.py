"""The architecture as a test: the tables of docs/architecture.md say which part may import which."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src" / "art"
NOBODY_IMPORTS = {"cli", "testing"}
"""Entry points: only `cli` and `testing` themselves may import these."""


def table(first_column: str) -> dict[str, set[str] | None]:
    """The rows of one table: what the part or room may import, `None` for anything."""
    lines = (ROOT / "docs" / "architecture.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows: dict[str, set[str] | None] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, allowed = (cell.strip() for cell in line.strip("|").split("|", 1))
        words = re.sub(r"\([^)]*\)", "", allowed)
        if words.startswith("nothing"):
            rows[name.strip("`")] = set()
        else:
            rows[name.strip("`")] = None if words.startswith("anything") else {w.strip() for w in words.split(",")}
    return rows


ALLOWED = table("part")
ROOMS = table("room")


def parts() -> list[str]:
    return sorted(
        {
            path.stem if path.is_file() else path.name
            for path in SRC.iterdir()
            if not path.name.startswith("_") and path.suffix in ("", ".py")
        }
    )


def imported_parts(path: Path) -> set[tuple[str, int]]:
    """`(part, line)` of every import of ours in a file, those inside functions and `TYPE_CHECKING` blocks too."""
    found: set[tuple[str, int]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(name.name.split(".")[1], node.lineno) for name in node.names if name.name.startswith("art.")}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "art":
            words = node.module.split(".")
            names = [words[1]] if len(words) > 1 else [name.name for name in node.names]
            found |= {(name, node.lineno) for name in names}
    return found


@pytest.mark.parametrize("part", parts())
def test_part_imports_only_what_it_may(part: str) -> None:
    assert part in ALLOWED, f"src/art/{part} is new: give it a row in docs/architecture.md"
    allowed = ALLOWED[part]
    root = SRC / part
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    wrong = []
    for path in files:
        for other, line in sorted(imported_parts(path)):
            private_entry = other in NOBODY_IMPORTS and part not in NOBODY_IMPORTS
            if other != part and (private_entry or (allowed is not None and other not in allowed)):
                wrong.append(f"{path.relative_to(SRC)}:{line} imports art.{other}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_room_imports_only_what_it_may_of_its_own_part(room: str) -> None:
    part, name = room.split("/")
    allowed = ROOMS[room]
    assert allowed is not None
    root = SRC / part / name
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    assert files
    wrong = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            inside = module.removeprefix(f"art.{part}").lstrip(".") if module.startswith(f"art.{part}") else ""
            if inside and inside.split(".")[0] not in {name, *allowed}:
                wrong.append(f"{path.relative_to(SRC)}:{node.lineno} imports {module}")
    assert not wrong, "\n".join(wrong)


def module_imports() -> dict[str, set[str]]:
    """Which module of ours imports which, at its top level and in functions."""
    names = {path: ".".join(path.relative_to(SRC.parent).with_suffix("").parts) for path in SRC.rglob("*.py")}
    modules = {name.removesuffix(".__init__") for name in names.values()}
    imports: dict[str, set[str]] = {}
    for path, name in names.items():
        found = imports.setdefault(name.removesuffix(".__init__"), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {module if module in modules else node.module for module in whole}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        found &= modules
    return imports


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = module_imports()
    remaining = dict(imports)
    while leaves := [module for module, needed in remaining.items() if not needed & (remaining.keys() - {module})]:
        for module in leaves:
            del remaining[module]
    # What is left imports a circle or is part of one; without those that nobody left imports, only circles remain.
    while tops := set(remaining) - set().union(*(remaining[m] - {m} for m in remaining)) if remaining else set():
        for module in tops:
            del remaining[module]
    assert not remaining, f"these modules import each other: {', '.join(sorted(remaining))}"


def test_older_names_use_nothing_of_the_entry_points() -> None:
    wrong = [
        f"{path.name}:{line} imports art.{other}"
        for path in sorted((SRC.parent / "openpipe_art").glob("*.py"))
        for other, line in sorted(imported_parts(path))
        if other in NOBODY_IMPORTS
    ]
    assert not wrong, "\n".join(wrong)


def test_the_files_that_the_page_tells_to_open_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page[: page.index("## The loop")])
    assert len(named) > 30
    assert [name for name in named if not (SRC / name).exists()] == []


def test_table_has_no_row_for_a_part_that_is_gone() -> None:
    assert set(ALLOWED) <= set(parts())
    assert len(ALLOWED) > 30
    assert len(ROOMS) > 5


def test_the_table_itself_catches_a_wrong_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from art.engines.torch import engine\n    import art.trainer.trainer\n")
    assert {name for name, _ in imported_parts(bad)} == {"engines", "trainer"}
