"""The architecture as a test: the tables of docs/architecture.md say which part may import which.

Imports inside functions and in `TYPE_CHECKING` blocks count too.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src"
CORE = SRC / "art"
NOBODY_IMPORTS = {"cli", "testing"}
"""Entry points: only these themselves, and the buildings' commands, may import them."""
NAMES_FOR_TYPE_CHECKERS = {"art"}
"""Modules that name types of buildings under `TYPE_CHECKING`, since they offer them under public names."""
MAX_ALIAS_LINES = 12
"""A core module that imports a building is only a path for user programs: a docstring and imports."""


@cache
def modules() -> dict[str, Path]:
    paths = sorted(SRC.rglob("*.py"))
    return {".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def read_imports(path: Path, known: dict[str, Path]) -> set[tuple[str, int, str]]:
    """`(module, line, name)` of every import of ours in a file. `name` is empty where a whole module is imported."""
    found: set[tuple[str, int, str]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, node.lineno, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add((whole, node.lineno, "") if whole in known else (node.module, node.lineno, alias.name))
    return {item for item in found if item[0] in known}


@cache
def imports() -> dict[str, set[tuple[str, int, str]]]:
    known = modules()
    return {name: read_imports(path, known) for name, path in known.items()}


def table(first_column: str) -> dict[str, set[str] | None]:
    """The rows of one table: what the part or building may import, `None` for anything."""
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
            rows[name.strip("`")] = None if words.startswith("anything") else {w.strip(" `") for w in words.split(",")}
    return rows


PARTS, BUILDINGS = table("part"), table("building")


def parts() -> set[str]:
    return {path.stem for path in CORE.iterdir() if not path.name.startswith("_") and path.suffix in ("", ".py")}


def part_of(module: str) -> str:
    """The part of the core that a module belongs to; empty for `art` itself and for buildings."""
    words = module.split(".")
    return words[1] if words[0] == "art" and len(words) > 1 else ""


@pytest.mark.parametrize("part", sorted(parts()))
def test_a_part_imports_only_what_it_may(part: str) -> None:
    assert part in PARTS, f"src/art/{part} is new: give it a row in docs/architecture.md"
    allowed = PARTS[part]
    wrong = []
    for name, found in imports().items():
        if part_of(name) != part:
            continue
        for module, line, _ in sorted(found):
            other = part_of(module)
            entry = other in NOBODY_IMPORTS and part not in NOBODY_IMPORTS
            if other and other != part and (entry or (allowed is not None and other not in allowed)):
                wrong.append(f"{name}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_core_imports_no_building() -> None:
    wrong = []
    for name, found in imports().items():
        if name.split(".")[0] != "art" or name in NAMES_FOR_TYPE_CHECKERS:
            continue
        lines = modules()[name].read_text().splitlines()
        outside = [f"{name}:{line} imports {module}" for module, line, _ in found if module.split(".")[0] != "art"]
        if outside and len([line for line in lines if line.strip()]) > MAX_ALIAS_LINES:
            wrong += outside
    assert not wrong, "\n".join(sorted(wrong))


def test_buildings_import_public_names_and_few_other_buildings() -> None:
    wrong = []
    for name, found in imports().items():
        building = name.split(".")[0]
        if building == "art":
            continue
        allowed = BUILDINGS[building]
        for module, line, imported in sorted(found):
            other = module.split(".")[0]
            foreign = other not in {"art", building} and allowed is not None and other not in allowed
            private = other != building and (imported.startswith("_") or "._" in module)
            if foreign or private:
                wrong.append(f"{name}:{line} imports {module} {imported}")
    assert not wrong, "\n".join(wrong)


def circles(graph: dict[str, set[str]]) -> set[str]:
    """The nodes of a graph that reach themselves, and those between them."""
    remaining = {node: set(others) for node, others in graph.items()}
    while leaves := [node for node, others in remaining.items() if not others & (remaining.keys() - {node})]:
        for node in leaves:
            del remaining[node]
    # What is left imports a circle or is part of one; without those that nobody left imports, only circles remain.
    while (
        tops := set(remaining) - set().union(*(remaining[node] - {node} for node in remaining)) if remaining else set()
    ):
        for node in tops:
            del remaining[node]
    return set(remaining)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles({name: {module for module, _, _ in found} for name, found in imports().items()}) == set()


def test_no_folders_import_each_other_in_a_circle() -> None:
    """Within each folder, its files and sub-folders import each other in one direction."""
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, found in imports().items():
        own = name.split(".")
        if name in NAMES_FOR_TYPE_CHECKERS:
            continue
        for module, _, _ in found:
            other = module.split(".")
            shared = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
            if shared:  # both lie below one folder; nothing is asked of the paths for user programs
                graphs[".".join(own[:shared])][own[shared]].add(other[shared])
    wrong = {folder: sorted(circles(graph)) for folder, graph in graphs.items()}
    assert {folder: names for folder, names in wrong.items() if names} == {}


def test_the_files_that_the_page_tells_to_open_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page[: page.index("## The loop")])
    assert len(named) > 20
    assert [name for name in named if not (CORE / name).exists()] == []


def test_the_tables_have_no_row_for_what_is_gone() -> None:
    assert set(PARTS) <= parts()
    assert set(BUILDINGS) == {path.name for path in SRC.iterdir() if (path / "__init__.py").exists()} - {"art"}
    assert len(PARTS) > 25


def test_a_wrong_import_is_seen(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from art.engines.torch import embedded\n    import art.trainer.trainer\n")
    assert {module for module, _, _ in read_imports(bad, modules())} == {
        "art.engines.torch.embedded",
        "art.trainer.trainer",
    }
