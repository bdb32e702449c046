"""docs/api*.md: every name of `art.__all__` and of the modules that users import, with signature and docstring."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel

import art
import art.messages
from tools.pages.markdown import escaped, header, prose, table
from tools.pages.settings import address, settings_classes, settings_of
from tools.pages.source import alias_definition, own_docstring, type_text

_INTRODUCTION = """
Every public name of `import art`. See also [settings](settings.md), [errors](errors.md) and [commands](cli.md).
Names that older programs use are listed in [older_code.md](older_code.md).
"""
_PAGES: dict[str, tuple[str, str, str, str]] = {
    "api.md": ("Public API", _INTRODUCTION, "", ""),
    "api_models.md": (
        "API: models and costs",
        "A model that is trained, a model of somebody else, and what they cost. [All names](api.md).",
        "Model TrainableModel TrainResult Ledger Prices",
        "",
    ),
    "api_backends.md": (
        "API: backends",
        "Where a model is trained and sampled. [All names](api.md).",
        "Backend LocalBackend RemoteBackend",
        "",
    ),
    "api_rollouts.md": (
        "API: rollouts and tasks",
        "The record of a rollout, what runs many of them, and an agent with its scenarios. [All names](api.md).",
        "FaultWatch History Trajectory TrajectoryGroup auto_trajectory capture current_trajectory gather_trajectories "
        "gather_trajectory_groups no_capture pipeline trajectory_group trajectory_group_batches",
        "art.task",
    ),
    "api_rewards.md": (
        "API: rewards, scenarios, MCP",
        "Judges, generated inputs, and tools of MCP servers. [All names](api.md).",
        "",
        "art.rewards art.scenarios art.mcp",
    ),
    "api_engines.md": (
        "API: the engine contract, the trainer",
        "For an engine of your own, and for the trainer without a server. [All names](api.md).",
        "",
        "art.engine art.trainer.trainer",
    ),
}
"""For each page: title, introduction, names of `art`, and modules whose names are all on it."""
_LINE = 110
_EMPTY = inspect.Parameter.empty


def pages() -> dict[str, Callable[[], str]]:
    """Return each page's name, with the function that renders it as Markdown."""
    return {name: functools.partial(_render, name) for name in _PAGES}


def page_of(name: str) -> str:
    """Return the name of the page that a name of `art` is on."""
    for page, (_, _, names, modules) in _PAGES.items():
        if name in names.split() or any(name in _names_of(module) for module in modules.split()):
            return page
    return "api.md"


@functools.cache
def _names_of(module: str) -> dict[str, Any]:
    """Return the public classes and functions of a module, those of its `__all__` where it has one."""
    loaded = importlib.import_module(module)
    own = [name for name, value in vars(loaded).items() if getattr(value, "__module__", None) == module]
    values = {name: getattr(loaded, name) for name in getattr(loaded, "__all__", own) if not name.startswith("_")}
    return {name: value for name, value in values.items() if _is_own_class(value) or inspect.isfunction(value)}


def _render(page: str) -> str:
    title, introduction, _, modules = _PAGES[page]
    parts = [header(title, introduction)]
    if page == "api.md":
        parts += _overview()
    of_modules = {name for module in modules.split() for name in _names_of(module)}
    names = [name for name in sorted(art.__all__, key=str.lower) if page_of(name) == page and name not in of_modules]
    values = {name: getattr(art, name) for name in names}
    kinds: dict[str, Callable[[Any], bool]] = {
        "Classes": _is_own_class, "Functions": inspect.isfunction, "Modules": inspect.ismodule,
    }  # fmt: skip
    for kind, is_kind in kinds.items():
        if sections := [_section(name, value) for name, value in values.items() if is_kind(value)]:
            parts += [f"## {kind}\n\n", *sections]
    for module in modules.split():
        about = prose(inspect.getdoc(importlib.import_module(module)) or "")
        parts += [f"## {module}\n\n{about}\n\n"]
        parts += [_section(name, value) for name, value in _names_of(module).items()]
    rows = [
        (f"`{name}`", f"`{alias_definition('art.messages', name).replace(' | ', ' or ')}`")
        for name, value in values.items()
        if not any(is_kind(value) for is_kind in kinds.values())
    ]
    if rows:
        parts += ["## Types\n\nThese names are for annotations.\n\n", table(("name", "is"), rows)]
    return "".join(parts).rstrip("\n") + "\n"


def _overview() -> Iterator[str]:
    """Name what each other page has."""
    for page, (title, _, _, modules) in _PAGES.items():
        if page != "api.md":
            names = [name for name in sorted(art.__all__, key=str.lower) if page_of(name) == page]
            what = [f"`{module}`" for module in modules.split()] + [f"`{name}`" for name in names]
            yield f"- [{title}]({page}): {', '.join(what)}\n"
    yield "\n"


def _is_own_class(value: Any) -> bool:
    return inspect.isclass(value) and value.__module__.startswith("art")


def _section(name: str, value: Any) -> str:
    if inspect.isclass(value) and value.__name__ != name:
        text = f"### {name}\n\nAnother name of {_link(value.__name__)}."
    elif inspect.isclass(value):
        text = f"### {name}\n\n{_class(value)}"
    elif inspect.ismodule(value):
        text = f"### art.{name}\n\n{_module(value)}"
    else:
        text = f"### {name}\n\n{_function(f'art.{name}', value)}"
    return text.rstrip("\n") + "\n\n"


def _link(name: str) -> str:
    return f"[{name}]({page_of(name)}#{name.lower()})"


def _class(cls: type) -> str:
    text = prose(own_docstring(cls))
    parts = [f"{text}\n\n"] if text else []
    if cls in settings_classes():
        return f"{''.join(parts)}Its settings: [{cls.__name__}]({address(cls)}).\n\n{_methods(cls)}"
    if issubclass(cls, BaseModel) or hasattr(cls, "__dataclass_fields__"):
        rows = [(f"`{name}`", f"`{kind}`", default, escaped(doc)) for name, kind, default, doc in settings_of(cls)]
        parts += [table(("field", "type", "default", "meaning"), rows), "\n"]
    elif "__init__" in vars(cls):
        parts += [_function(cls.__name__, vars(cls)["__init__"])]
    return "".join(parts) + _methods(cls)


def _methods(cls: type) -> str:
    """Write the public methods of `cls`, and where to read those that it inherits from another public class."""
    parent = next((base for base in cls.__mro__[1:] if getattr(art, base.__name__, None) is base), None)
    inherited = f"It also has the methods of {_link(parent.__name__)}.\n\n" if parent else ""
    members = sorted(_members(cls, parent))
    return inherited + "".join(f"#### {cls.__name__}.{name}\n\n{text}" for name, text in members)


def _members(cls: type, parent: type | None) -> Iterator[tuple[str, str]]:
    """Yield the public methods and properties that ART defines for `cls` and not for `parent`, each with its text."""
    for name, value in inspect.getmembers_static(cls):
        definer = next((base for base in cls.__mro__ if name in vars(base)), cls)
        is_ours = definer.__module__.startswith("art") and not (parent and definer in parent.__mro__)
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
