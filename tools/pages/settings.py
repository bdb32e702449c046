"""docs/settings*.md: every setting with its type, limits, default and meaning, on a page for each kind of class."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import art
import art.config
from art.config import LossConfig
from art.rewards import JudgeSettings
from art.task import TaskDefaults
from tools.pages.markdown import escaped, header, prose, table
from tools.pages.source import attribute_docs, limits_text, own_docstring, type_text

_INTRODUCTION = """
Every setting of ART, with its type, its default and what it does. Settings are fields of classes:
`from art.config import LoraConfig`. An unknown name, a value out of range, and a setting that the chosen engine or
device cannot honour are each a `ConfigError`.

- A training call takes the fields of [`TrainConfig`](#trainconfig) by name:
  `backend.train(model, groups, learning_rate=2e-5)`.
- A model takes [`ModelSettings`](#modelsettings): `art.TrainableModel(..., settings=art.ModelSettings(...))`.
- `LossConfig` is any of [the losses](settings_losses.md).
- A server takes [`ServerConfig`](settings_engines.md#serverconfig): `art-server --config FILE`, or
  `LocalBackend(server_config=...)`.
"""
_PAGES = {
    "settings.md": ("Settings", _INTRODUCTION),
    "settings_losses.md": (
        "Settings of losses",
        "Pass one, or a tuple of several, as `loss` of a training call. [Objectives](objectives.md) has the formulas.",
    ),
    "settings_engines.md": (
        "Settings of engines, trainers and servers",
        "What samples and what trains: fields of [`ModelSettings`](settings.md#modelsettings). What a server does: "
        "[Serve a team](server.md) explains it.",
    ),
}
_PAGE_OF_MODULE = {"losses": "settings_losses.md", "processes": "settings_engines.md"}
_OF_SERVERS = ("ServerConfig", "LimitsConfig", "PricesConfig")
_FIRST = (art.TrainConfig, art.TrainSFTConfig, art.ModelSettings, art.config.ServerConfig)
_COMPUTED = object()
"""Marks a default that is computed for each object."""
_TAG = "Names the class in JSON, TOML and YAML."
_ORDER = ("training", "losses", "server", "engines", "trainer")
"""Modules of `art.config` in the order in which a reader needs them; further ones follow."""


@functools.cache
def settings_classes() -> list[type]:
    """List the classes that have settings: those of `art.config` by module and place, then the others."""
    public = [getattr(art.config, name) for name in art.config.__all__]
    classes = [each for each in public if inspect.isclass(each) and issubclass(each, art.config.Config)]
    with_fields = [cls for cls in classes if cls.model_fields]
    return [*sorted(with_fields, key=_place), JudgeSettings, TaskDefaults]


def _place(cls: type) -> tuple[int, str, int]:
    """Order classes: those that a user makes first, then by module and by line."""
    if cls in _FIRST:
        return (-1, "", _FIRST.index(cls))
    name = cls.__module__.rpartition(".")[2]
    source = ast.parse(inspect.getsource(importlib.import_module(cls.__module__)))
    line = next(node.lineno for node in source.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name, line)


def settings_of(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type with limits, default and meaning of each setting of `cls`."""
    docs = attribute_docs(cls)
    if issubclass(cls, BaseModel):
        for name, field in cls.model_fields.items():
            default = _default(field.default, field.default_factory)
            limits = limits_text(field.metadata)
            kind = type_text(field.annotation).replace(type_text(LossConfig), "LossConfig")
            tag = _TAG if len(get_args(field.annotation)) == 1 and get_origin(field.annotation) is Literal else ""
            yield name, kind + (f", {limits}" if limits else ""), _value(default), docs.get(name, tag)
    else:
        try:
            hints = get_type_hints(cls)
        except NameError:  # a type that only type checkers import
            hints = {each.name: each.type for each in dataclasses.fields(cast(Any, cls))}
        for each in dataclasses.fields(cast(Any, cls)):
            default = _default(each.default, each.default_factory)
            yield each.name, type_text(hints[each.name]), _value(default), docs.get(each.name, "")


def _default(default: Any, factory: Any) -> Any:
    """Return the default of a field. A factory other than an empty container gives another value each time."""
    if factory in (None, dataclasses.MISSING):
        return default
    return factory() if factory in (dict, list, set, tuple) else _COMPUTED


def _value(default: Any) -> str:
    if default is _COMPUTED:
        return "computed"
    if default is PydanticUndefined or default is dataclasses.MISSING:
        return "required"
    if isinstance(default, BaseModel) or dataclasses.is_dataclass(default):
        name = type(default).__name__
        return f"[`{name}()`]({address(type(default))})" if type(default) in settings_classes() else f"`{name}()`"
    if isinstance(default, tuple) and default and isinstance(default[0], BaseModel):
        return ", ".join(map(_value, default))
    if isinstance(default, int) and not isinstance(default, bool) and default >= 10_000:
        return f"`{default:_}`"
    return f"`{default!r}`"


def page_of(cls: type) -> str:
    """Return the name of the page that a class is on."""
    if cls.__name__ in _OF_SERVERS:
        return "settings_engines.md"
    return _PAGE_OF_MODULE.get(cls.__module__.rpartition(".")[2], "settings.md")


def address(cls: type) -> str:
    """Return the link to a class from another page."""
    return f"{page_of(cls)}#{cls.__name__.lower()}"


def pages() -> dict[str, Callable[[], str]]:
    """Return each page's name, with the function that renders it as Markdown."""
    return {name: functools.partial(_render, name) for name in _PAGES}


def _render(page: str) -> str:
    parts = [header(*_PAGES[page])]
    if page == "settings.md":
        rows = ((f"[{cls.__name__}]({address(cls)})", _first_sentence(cls)) for cls in settings_classes())
        parts += [table(("class", "holds"), rows), "\n"]
    parts += [_section(cls) for cls in settings_classes() if page_of(cls) == page]
    return "".join(parts).rstrip("\n") + "\n"


def _first_sentence(cls: type) -> str:
    paragraph = " ".join(own_docstring(cls).partition("\n\n")[0].split())
    return escaped(re.split(r"(?<=[.:])\s", paragraph)[0].rstrip(":"))


def _section(cls: type) -> str:
    rows = ((f"`{name}`", f"`{kind}`", default, escaped(meaning)) for name, kind, default, meaning in settings_of(cls))
    packages = [package for package in ("art.config", "art.task") if cls.__module__.startswith(f"{package}.")]
    where = packages[0] if packages else cls.__module__
    parts = [f"## {cls.__name__}\n\n", f"`{where}.{cls.__name__}`\n\n"]
    parts += [f"{text}\n\n"] if (text := prose(own_docstring(cls))) else []
    return "".join([*parts, table(("setting", "type", "default", "meaning"), rows), "\n"])
