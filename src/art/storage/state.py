"""`state.json`: what a user's script wants to remember between runs, such as how far it came in its data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from art.errors import StorageError
from art.storage.atomic import storage_errors, write_file


def read_state(path: Path) -> dict[str, Any] | None:
    """The saved state, `None` before the first one.

    Raises:
        StorageError: the file is not a JSON object.
    """
    with storage_errors(path, "reading"):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
    try:
        state = json.loads(text)
    except ValueError as error:
        raise StorageError(f"{path} is no JSON ({error}); repair it or delete it to begin with no state") from error
    if not isinstance(state, dict):
        raise StorageError(f"{path} holds a {type(state).__name__}, expected a JSON object; repair it or delete it")
    return state


def overwrite_state(path: Path, state: dict[str, Any]) -> None:
    """Replace the state.

    Raises:
        StorageError: writing failed, or a value has no JSON form; the old state stays.
    """
    try:
        text = json.dumps(state, indent=2, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise StorageError(f"this state cannot be written as JSON: {error}") from error
    with storage_errors(path, "writing"):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.encode())


def merge_state(path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Write `changes` over the saved state, dicts inside of dicts key by key, and return the result."""
    merged = _merged(read_state(path) or {}, changes)
    overwrite_state(path, merged)
    return merged


def _merged(old: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(old)
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result
