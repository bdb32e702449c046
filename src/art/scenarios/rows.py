"""Rows `{"<text>": ..., "difficulty": ...}` in a model's answer: the schema to ask with, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from art.errors import GenerationError
from art.rewards.asking.answers import objects_in
from art.scenarios.written import MAX_DIFFICULTY, MIN_DIFFICULTY

MAX_SHOWN = 200
"""Number of the newest texts that a generator is shown, so that it does not write them again."""


def rows_format(field: str) -> dict[str, Any]:
    """Make OpenAI's `response_format` for a list `scenarios` of objects with a text `field` and a difficulty."""
    # Several providers support no minimum and maximum in strict schemas, but all support an enumeration.
    difficulty = {"type": "integer", "enum": list(range(MIN_DIFFICULTY, MAX_DIFFICULTY + 1))}
    item = object_schema({field: {"type": "string"}, "difficulty": difficulty})
    return json_format("scenarios", {"scenarios": {"type": "array", "items": item}})


def json_format(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = object_schema(properties)
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema}}


def object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """Make the JSON schema of an object with exactly these properties, as OpenAI's strict mode wants it."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def further_parts(instructions: str | None, known: Sequence[str], complaint: str | None) -> list[str]:
    """Write the end of a request: instructions, texts that exist already, and what was wrong with the last answer."""
    parts = [instructions] if instructions else []
    if known:
        parts.append("These exist already; write other ones:\n" + "\n".join(f"- {text}" for text in known[-MAX_SHOWN:]))
    if complaint:
        parts.append(f"Your last answer was of no use: {complaint}.")
    return parts


def candidates_in(text: str) -> list[Any]:
    """JSON values in a model's answer: only the whole answer if that is JSON, else all values in it, the last first."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return objects_in(text)[::-1]  # models think aloud first


def conversation(system: str, parts: Sequence[str]) -> list[dict[str, Any]]:
    """Make the messages of a request: a system message, and the parts as one user message."""
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n\n".join(parts)}]


def read_rows(text: str, field: str) -> list[tuple[str, int]]:
    """Read the scenarios in a generator's answer: pairs of text and difficulty.

    Unambiguous mistakes are repaired: a fence or words around the JSON, a list without the object around it, a
    difficulty in quotes. Rows without a text or with an invalid difficulty are left out.

    Raises:
        GenerationError: the answer has no rows. The message tells the generator why.
    """
    for value in candidates_in(text):
        rows = value.get("scenarios") if isinstance(value, dict) else value
        if isinstance(rows, list) and any(isinstance(row, dict) for row in rows):
            valid = [row for row in (_read_row(row, field) for row in rows) if row is not None]
            if valid:
                return valid
            raise GenerationError(
                f"no scenario has both a text `{field}` and a difficulty from {MIN_DIFFICULTY} to {MAX_DIFFICULTY}"
            )
    raise GenerationError("it is not a JSON object with a list `scenarios`, or it was cut short")


def _read_row(row: Any, field: str) -> tuple[str, int] | None:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        return None
    difficulty = row.get("difficulty")
    try:
        if isinstance(difficulty, (str, float)):
            difficulty = int(difficulty) if float(difficulty) == int(float(difficulty)) else None
    except (ValueError, OverflowError):
        return None
    if isinstance(difficulty, bool) or difficulty not in range(MIN_DIFFICULTY, MAX_DIFFICULTY + 1):
        return None
    return clean(text), difficulty


def clean(text: str) -> str:
    """Strip blanks, and replace lone surrogates, which JSON can hold and files cannot."""
    return text.encode("utf-8", "replace").decode().strip()
