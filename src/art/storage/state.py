"""Read and write `state.json`, in which a user's script stores values between runs, e.g. its place in a data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from art.errors import StorageError
from art.storage.atomic import storage_errors, write_file


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the saved state; `None` if none was saved yet.

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
        raise StorageError(
            f"{path} is not valid JSON ({error}); repair it, or delete it to begin without state"
        ) from error
    if not isinstance(state, dict):
        raise StorageError(f"{path} must be a JSON object, got a {type(state).__name__}; repair it or delete it")
    return state


def overwrite_state(path: Path, state: dict[str, Any]) -> None:
    """Replace the saved state.

    Raises:
        StorageError: writing failed, or a value has no JSON form. The old state is kept.
    """
    try:
        text = json.dumps(state, indent=2, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise StorageError(f"this state cannot be written as JSON: {error}") from error
    with storage_errors(path, "writing"):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.encode())


def merge_state(path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Merge `changes` into the saved state, nested dicts key by key. Returns the new state."""
    merged = _merged(read_state(path) or {}, changes)
    overwrite_state(path, merged)
    return merged


def _merged(old: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(old)
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result
