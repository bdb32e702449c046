"""Every setting says what it is, in a docstring of its own that a newcomer sees in the editor and in the help."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[3] / "src" / "art"
FILES = [*sorted((SRC / "config").glob("*.py")), SRC / "model" / "model.py", SRC / "model" / "trainable.py"]
FILES += sorted((SRC / "trajectory").glob("*.py"))


def undocumented(tree: ast.Module) -> Iterator[str]:
    """`Class.field` of public fields without a docstring after them."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if not statement.target.id.startswith("_") and not documented:
                yield f"{node.name}.{statement.target.id}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_field_has_a_docstring(path: Path) -> None:
    assert list(undocumented(ast.parse(path.read_text()))) == []


def test_the_rule_finds_a_field_without_one() -> None:
    tree = ast.parse('class A(Config):\n    x: int = 1\n    y: int = 2\n    """Number of y."""\n    _z: int = 3')
    assert list(undocumented(tree)) == ["A.x"]
