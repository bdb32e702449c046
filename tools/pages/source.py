"""Read documentation from source code: docstrings of attributes, types, values."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _docs_in(body: list[ast.stmt]) -> dict[str, str]:
    """Find the string after each assignment in `body`: the text by the name that is assigned."""
    docs = {}
    for statement, following in itertools.pairwise(body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = following.value if isinstance(following, ast.Expr) else None
        if isinstance(targets[0], ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            docs[targets[0].id] = inspect.cleandoc(value.value)
    return docs


def attribute_docs(cls: type) -> dict[str, str]:
    """Collect the docstrings of the fields of `cls`, inherited ones included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("art"):
            continue
        for node in ast.walk(_tree(base.__module__)):
            if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                docs |= _docs_in(node.body)
    return docs


def alias_definition(module: str, name: str) -> str:
    """Return the source of the right side of `name = ...` in `module`, or "" where there is none."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.unparse(node.value)
    return ""


def own_docstring(cls: type) -> str:
    """Return the docstring that the source of `cls` contains. A dataclass without one would answer its signature."""
    for node in ast.walk(_tree(cls.__module__)):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            return ast.get_docstring(node) or ""
    return ""


def type_text(annotation: Any) -> str:
    """Write a type as a reader would: `int or None`, `"auto" or "cpu"`, the name of a class."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return " or ".join(f'"{value}"' if isinstance(value, str) else repr(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(part) for part in arguments))
    if annotation in (None, type(None)):
        return "None"
    if annotation is Ellipsis:
        return "..."
    name = getattr(origin or annotation, "__name__", None) or str(annotation)
    return f"{name}[{', '.join(type_text(part) for part in arguments)}]" if arguments else str(name)


def limits_text(metadata: list[Any]) -> str:
    """Write the bounds of a pydantic field: `at least 1, below 10`."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = ((word, getattr(item, name, None)) for item in metadata for name, word in words.items())
    return ", ".join(f"{word} {bound:,}" for word, bound in bounds if bound is not None)
