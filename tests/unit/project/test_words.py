"""The words of the source: whole sentences in plain English, and names that say what a thing is."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = [Path(__file__).parents[3] / "src" / name for name in ("art", "openpipe_art")]
CONTINUES_A_NAME = re.compile(
    r"(Of|As|By|In which|The same|To which|From which|For which|Whose|Those|So is|Such)\b(?! soon)"
)
"""A docstring that begins like this continues the name above it, and says nothing on its own."""
KNOTTED = re.compile(
    r"\b(anew|whoever|whomever|in vain|so long(?! as)|for so long|so many|of late|is to have|are to have|cannot be had|can be had"
    r"|forestalls?|lest|thereof|whereof|therein|wherein|henceforth|of its own accord|comes? into being|what is to be)\b"
    r"|\bstands? (for|at|in|there|still|alone|beside|by itself)\b(?! the letter)",
    re.IGNORECASE,
)
BEHIND = re.compile(
    r"\bbehind\b(?! (a|the|an|its|this|that) ?(\w+ )?(proxy|proxies|server|gateway|address|client|name|seam|call))",
    re.I,
)
"""`behind` is a place (behind a proxy); in time the word is `after`."""
VAGUE_NAMES = {"found", "given", "wanted"}
"""Locals that name an act. The thing has a name: `exchange`, `checkpoint`, `settings`."""


def parts() -> list[str]:
    return sorted(
        f"{source.name}/{path.stem if path.is_file() else path.name}"
        for source in SOURCES
        for path in source.iterdir()
        if path.suffix in ("", ".py") and (path.name == "__init__.py" or not path.name.startswith("_"))
    )


def files_of(part: str) -> list[Path]:
    source, name = part.split("/")
    root = SOURCES[0].parent / source / name
    return sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings, and the strings that document the assignment before them."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, (ast.Lambda, ast.IfExp)) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def complaints(text: str) -> list[tuple[int, str]]:
    """`(line, what is wrong)` of a source file."""
    tree = ast.parse(text)
    wrong = [
        (line, f"a docstring that continues a name: {words[:60]!r}")
        for line, words in docstrings(tree)
        if CONTINUES_A_NAME.match(words.strip())
    ]
    for line, words in [*strings(tree), *comments(text)]:
        wrong += [(line, f"say it plainly: {match[0]!r} in {words[max(match.start() - 30, 0) : match.end() + 30]!r}")
                  for pattern in (KNOTTED, BEHIND) for match in pattern.finditer(words)]  # fmt: skip
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    # The wire has a field `found`, which cannot get another name.
    fields = {item.target for each in classes for item in each.body if isinstance(item, ast.AnnAssign)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node not in fields
            and node.id in VAGUE_NAMES
        ):
            wrong.append((node.lineno, f"name the thing, not the act: `{node.id}`"))
        elif isinstance(node, ast.arg) and node.arg in VAGUE_NAMES:
            wrong.append((node.lineno, f"name the thing, not the act: `{node.arg}`"))
    return sorted(set(wrong))


@pytest.mark.parametrize("part", parts())
def test_words(part: str) -> None:
    wrong = [f"{path}:{line}: {what}" for path in files_of(part) for line, what in complaints(path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_the_rules_find_what_they_are_for() -> None:
    bad = '"""Of the copy."""\n# started anew, behind it\nfound = [1]\ndef f(given): ...\nx = "for so long"\n'
    assert [line for line, _ in complaints(bad)] == [1, 2, 2, 3, 4, 5]
    good = '"""The size of the copy. It runs behind a proxy."""\n# started again, as long as needed\ncopies = [1]\n'
    assert complaints(good) == []
