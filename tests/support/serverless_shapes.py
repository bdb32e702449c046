"""Checks values against the frozen shapes of the Serverless Training API, `serverless_api.json`."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

API: dict[str, Any] = json.loads((Path(__file__).parent / "serverless_api.json").read_text())
TYPES: dict[str, Any] = API["types"]
_PLAIN: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}


def faults(value: Any, shape: str, where: str = "body") -> list[str]:
    """Return what is wrong with `value`, each as `place: what`; nothing for a value of this shape."""
    choices = _split(shape)
    if len(choices) > 1:
        complaints = [faults(value, choice, where) for choice in choices]
        return [] if any(not one for one in complaints) else min(complaints, key=len)
    if shape == "any" or (shape == "null" and value is None):
        return []
    if shape.startswith("'"):
        return [] if value == shape.strip("'") else [f"{where}: {value!r} is not {shape}"]
    if shape.startswith("["):
        if not isinstance(value, list):
            return [f"{where}: expected a list, got {value!r}"]
        return [fault for i, item in enumerate(value) for fault in faults(item, shape[1:-1], f"{where}.{i}")]
    if shape.startswith("{"):
        if not isinstance(value, dict):
            return [f"{where}: expected an object, got {value!r}"]
        return [fault for name, item in value.items() for fault in faults(item, shape[1:-1], f"{where}.{name}")]
    if shape in TYPES:
        kind = TYPES[shape]
        return faults(value, kind, where) if isinstance(kind, str) else _object_faults(value, kind, where)
    if shape == "uuid":
        return [] if _is_uuid(value) else [f"{where}: {value!r} is no uuid"]
    fits = isinstance(value, _PLAIN.get(shape, ())) and (shape == "boolean") == isinstance(value, bool)
    return [] if fits else [f"{where}: expected {shape}, got {value!r}"]


def _object_faults(value: Any, fields: dict[str, str], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: expected an object, got {value!r}"]
    known = {name.removesuffix("?"): (shape, name.endswith("?")) for name, shape in fields.items()}
    found = [f"{where}.{name}: no such field" for name in value.keys() - known.keys() if fields is not TYPES["Choice"]]
    for name, (shape, may_miss) in known.items():
        if name in value:
            found += faults(value[name], shape, f"{where}.{name}")
        elif not may_miss:
            found.append(f"{where}.{name}: missing")
    return found


def _split(shape: str) -> list[str]:
    """The choices of a shape: parts between `|` that are in no brackets."""
    parts, depth = [""], 0
    for sign in shape:
        depth += (sign in "[{") - (sign in "]}")
        if sign == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _is_uuid(value: Any) -> bool:
    try:
        return str(uuid.UUID(value)) == value
    except (ValueError, AttributeError, TypeError):
        return False
