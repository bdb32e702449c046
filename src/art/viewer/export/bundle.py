"""Joins the modules of the page into one classic script, because browsers load no modules from `file://`.

    import { h as make } from "../lib/dom.js";          const { h: make } = module_lib_dom;
    export function table() { ... }                     function table() { ... }  ...  return { table };

Each module becomes a function that is called once, after those that it imports. The modules are written for it: named
imports and exports on one line, no default exports, no `export let`, and no circle of imports.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

from art.errors import ConfigError

ENTRY = "main.js"
_IMPORT = re.compile(r'^import \{ ?([^}]*?),? ?\} from "([^"]+)";[ \t]*$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=((?:async )?function\*?|const|class) ([\w$]+))", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)


def bundle(files: Mapping[str, bytes]) -> str:
    """Return the script that does what `main.js` and the modules that it imports do.

    Args:
        files: content by name, e.g. `lib/dom.js`.

    Raises:
        ConfigError: a module has a form that cannot be joined, or imports what is not there.
    """
    parts: dict[str, str] = {}
    _add(ENTRY, files, parts, [])
    return '"use strict";\n(() => {\n' + "\n".join(parts.values()) + "})();\n"


def _add(name: str, files: Mapping[str, bytes], parts: dict[str, str], importing: list[str]) -> None:
    """Add the script of a module to `parts`, after those that it imports."""
    if name in importing:
        raise ConfigError(f"modules import each other in a circle: {' -> '.join([*importing, name])}")
    if name in parts:
        return
    text = files[name].decode()
    for names, target in _IMPORT.findall(text):
        module = _resolve(name, target, files)
        _add(module, files, parts, [*importing, name])
        _check_exported(name, names, module, files)
    body = _EXPORT.sub("", _IMPORT.sub(lambda match: _assignment(name, match, files), text))
    if (left := _LEFT.search(body)) is not None:
        raise ConfigError(f"the module {name} has a form that cannot be joined: {left[0][:80]!r}")
    exports = ", ".join(_exports(text))
    parts[name] = f"const {_variable(name)} = (() => {{\n{body.strip()}\nreturn {{ {exports} }};\n}})();\n"


def _assignment(name: str, match: re.Match[str], files: Mapping[str, bytes]) -> str:
    fields = match[1].replace(" as ", ": ")
    return f"const {{ {fields} }} = {_variable(_resolve(name, match[2], files))};"


def _check_exported(name: str, names: str, module: str, files: Mapping[str, bytes]) -> None:
    missing = {part.split(" as ")[0] for part in re.split(r",\s*", names.strip()) if part}
    missing -= set(_exports(files[module].decode()))
    if missing:
        raise ConfigError(f"the module {name} imports {sorted(missing)[0]!r} from {module}, which does not export it")


def _exports(text: str) -> list[str]:
    return [match[2] for match in _EXPORT.finditer(text)]


def _resolve(name: str, target: str, files: Mapping[str, bytes]) -> str:
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if not target.startswith(".") or path not in files:
        raise ConfigError(f"the module {name} imports {target!r}, which is no file of the page")
    return path


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))
