"""Upper bounds on the size of the house, so that growth is a decision: raise a bound only with a page in docs/decisions.

python -m tests.unit.project.test_size      prints the figures, and the names behind them
"""

from __future__ import annotations

import ast
import re
import statistics
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src"
MAX_LINES, MAX_CORE_LINES = 82_000, 52_400
MAX_FILES, MAX_CORE_FILES = 395, 250
MAX_FILE_LINES = 600
MAX_DEPTH = 3
"""Folders below a package."""
MIN_MODULES, MAX_SMALL_FOLDERS = 4, 5
MAX_ONE_IMPORTER = 61
MAX_SHARED_NAMES = 10
"""docs/glossary.md says what each of them means."""


def files(package: str = "*") -> dict[Path, int]:
    """Lines by file."""
    return {path: len(path.read_text().splitlines()) for path in sorted(SRC.glob(f"{package}/**/*.py"))}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def importers() -> dict[str, set[str]]:
    """For each module, the modules that import it, in functions too."""
    modules = {module_name(path): path for path in files()}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            named: set[str] = set()
            if isinstance(node, ast.Import):
                named = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                named = {one if one in modules else node.module for one in whole}
            for one in named & modules.keys() - {name}:
                found[one].add(name)
    return found


def with_one_importer() -> list[str]:
    """Modules that one other module imports, without packages and the ends of entry points."""
    text = (ROOT / "pyproject.toml").read_text()
    return sorted(
        name
        for name, others in importers().items()
        if len(others) == 1 and not (SRC / name.replace(".", "/")).is_dir() and f'"{name}' not in text
    )


def small_folders() -> list[str]:
    """Folders with fewer than four modules, `__init__` not counted."""
    modules: dict[Path, int] = defaultdict(int)
    for path in files():
        modules[path.parent] += path.name != "__init__.py"
    return sorted(f"{folder.relative_to(SRC)} {count}" for folder, count in modules.items() if count < MIN_MODULES)


def shared_class_names() -> dict[str, list[str]]:
    """Public classes that have the name of another one, with their modules."""
    found = defaultdict(list)
    for path in files():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module_name(path))
    return {name: modules for name, modules in sorted(found.items()) if len(modules) > 1}


def test_lines_and_files() -> None:
    whole, core = files(), files("art")
    assert sum(whole.values()) <= MAX_LINES
    assert sum(core.values()) <= MAX_CORE_LINES
    assert len(whole) <= MAX_FILES
    assert len(core) <= MAX_CORE_FILES
    assert {str(path): lines for path, lines in whole.items() if lines > MAX_FILE_LINES} == {}


def test_folders() -> None:
    deep = [str(path) for path in files() if len(path.relative_to(SRC).parts) - 2 > MAX_DEPTH]
    assert deep == []
    assert len(small_folders()) <= MAX_SMALL_FOLDERS, small_folders()


def test_modules_that_serve_one_other() -> None:
    assert len(with_one_importer()) <= MAX_ONE_IMPORTER


def test_one_name_one_thing() -> None:
    assert len(shared_class_names()) <= MAX_SHARED_NAMES, shared_class_names()


def once_called() -> list[str]:
    """Private functions that their file names once besides the definition, with their lines."""
    found = []
    for path, text in ((path, path.read_text()) for path in files()):
        for node in ast.walk(ast.parse(text)):
            is_private = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(r"_[a-z]", node.name)
            if is_private and len(re.findall(rf"\b{node.name}\b", text)) == 2:
                found.append(f"{module_name(path)}.{node.name} {(node.end_lineno or 0) - node.lineno + 1}")
    return found


if __name__ == "__main__":
    packages = sorted(path.name for path in SRC.iterdir() if path.is_dir() and (path / "__init__.py").exists())
    for package in packages:
        lines = files(package)
        print(f"{package:14} {sum(lines.values()):7,} lines {len(lines):4} files")
    whole = list(files().values())
    print(f"{'all':14} {sum(whole):7,} lines {len(whole):4} files, median {statistics.median(whole):.0f}")
    for title, names in (
        ("modules with one importer", with_one_importer()),
        ("folders with fewer than four modules", small_folders()),
        ("shared class names", [f"{name}: {', '.join(where)}" for name, where in shared_class_names().items()]),
    ):
        print(f"\n{len(names)} {title}\n  " + "\n  ".join(names))
    print(f"\n{len(once_called())} private functions that are called once")
