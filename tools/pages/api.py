"""docs/api.md: every name of `art.__all__` with its signature and docstring."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel

import art
import art.messages
from tools.pages.markdown import escaped, header, prose, table
from tools.pages.settings import settings_classes, settings_of
from tools.pages.source import alias_definition, own_docstring, type_text

_INTRODUCTION = """
Every public name of `import art`. See also [settings](settings.md), [errors](errors.md) and [commands](cli.md).
Names that older programs use are listed in [older_code.md](older_code.md).
"""
_LINE = 110
_EMPTY = inspect.Parameter.empty


def render_page() -> str:
    """Render the page as Markdown."""
    values = {name: getattr(art, name) for name in sorted(art.__all__, key=str.lower)}
    kinds: dict[str, Callable[[Any], bool]] = {
        "Classes": _is_own_class, "Functions": inspect.isfunction, "Modules": inspect.ismodule,
    }  # fmt: skip
    parts = [header("Public API", _INTRODUCTION)]
    for title, is_kind in kinds.items():
        parts += [f"## {title}\n\n", *(_section(name, value) for name, value in values.items() if is_kind(value))]
    rows = [
        (f"`{name}`", f"`{alias_definition('art.messages', name).replace(' | ', ' or ')}`")
        for name, value in values.items()
        if not any(is_kind(value) for is_kind in kinds.values())
    ]
    if rows:
        parts += ["## Types\n\nThese names are for annotations.\n\n", table(("name", "is"), rows)]
    return "".join(parts).rstrip("\n") + "\n"


def _is_own_class(value: Any) -> bool:
    return inspect.isclass(value) and value.__module__.split(".")[0] == "art"


def _section(name: str, value: Any) -> str:
    if inspect.isclass(value) and value.__name__ != name:
        text = f"### {name}\n\nAnother name of [{value.__name__}](#{value.__name__.lower()})."
    elif inspect.isclass(value):
        text = f"### {name}\n\n{_class(value)}"
    elif inspect.ismodule(value):
        text = f"### art.{name}\n\n{_module(value)}"
    else:
        text = f"### {name}\n\n{_function(f'art.{name}', value)}"
    return text.rstrip("\n") + "\n\n"


def _class(cls: type) -> str:
    text = prose(own_docstring(cls))
    parts = [f"{text}\n\n"] if text else []
    if cls in settings_classes():
        return f"{''.join(parts)}Its settings: [{cls.__name__}](settings.md#{cls.__name__.lower()}).\n\n{_methods(cls)}"
    if issubclass(cls, BaseModel) or hasattr(cls, "__dataclass_fields__"):
        rows = [(f"`{name}`", f"`{kind}`", default, escaped(doc)) for name, kind, default, doc in settings_of(cls)]
        parts += [table(("field", "type", "default", "meaning"), rows), "\n"]
    elif "__init__" in vars(cls):
        parts += [_function(cls.__name__, vars(cls)["__init__"])]
    return "".join(parts) + _methods(cls)


def _methods(cls: type) -> str:
    """Write the public methods of `cls`, and where to read those that it inherits from another public class."""
    parent = next((base for base in cls.__mro__[1:] if getattr(art, base.__name__, None) is base), None)
    inherited = f"It also has the methods of [{parent.__name__}](#{parent.__name__.lower()}).\n\n" if parent else ""
    members = sorted(_members(cls, parent))
    return inherited + "".join(f"#### {cls.__name__}.{name}\n\n{text}" for name, text in members)


def _members(cls: type, parent: type | None) -> Iterator[tuple[str, str]]:
    """Yield the public methods and properties that ART defines for `cls` and not for `parent`, each with its text."""
    for name, value in inspect.getmembers_static(cls):
        definer = next((base for base in cls.__mro__ if name in vars(base)), cls)
        is_ours = definer.__module__.split(".")[0] == "art" and not (parent and definer in parent.__mro__)
        if name.startswith("_") or not is_ours or name == "model_post_init":
            continue
        function = getattr(value, "__func__", value)
        if isinstance(value, property):
            yield name, f"Property. {prose(inspect.getdoc(value) or '')}\n\n"
        elif inspect.isfunction(function) and function.__doc__:
            yield name, _function(name, function)


def _function(name: str, function: Any) -> str:
    docstring = inspect.cleandoc(function.__doc__ or "")
    return f"```text\n{_signature(name, function)}\n```\n\n" + (f"{prose(docstring)}\n\n" if docstring else "")


def _signature(name: str, function: Any) -> str:
    """Write a definition without its body, one parameter a line where it is long."""
    signature = inspect.signature(function)
    parameters: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in parameters):
            parameters.append("*")
        parameters.append(_parameter(parameter))
    is_async = inspect.iscoroutinefunction(function)
    start = f"{'async ' if is_async else ''}{name}("
    end = f") -> {_annotation(signature.return_annotation)}" if signature.return_annotation is not _EMPTY else ")"
    line = f"{start}{', '.join(parameters)}{end}"
    return line if len(line) <= _LINE else "\n".join([start, *(f"    {text}," for text in parameters), end])


def _parameter(parameter: inspect.Parameter) -> str:
    stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
    annotation = "" if parameter.annotation is _EMPTY else f": {_annotation(parameter.annotation)}"
    value = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", repr(parameter.default))
    default = "" if parameter.default is _EMPTY else f"{' = ' if annotation else '='}{value}"
    return f"{stars}{parameter.name}{annotation}{default}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else type_text(annotation)


def _module(module: types.ModuleType) -> str:
    names = getattr(module, "__all__", None)
    listing = f"Names: {', '.join(f'`{each}`' for each in sorted(names))}.\n\n" if names else ""
    return f"{prose(inspect.getdoc(module) or '')}\n\n{listing}"
