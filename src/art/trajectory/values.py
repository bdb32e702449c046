"""Numbers and arrays of NumPy and torch, which agents like to assign, as plain Python values."""

from __future__ import annotations

import math
from typing import Any

from pydantic_core import to_json

MetricValue = float | int | bool
MetadataValue = float | int | str | bool | None


def to_plain(value: Any) -> Any:
    """Replace NumPy and torch scalars and arrays by Python values, inside lists and dictionaries too."""
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def finite_number(value: Any) -> float | None:
    """Convert a reward or metric to a float; `None` if it is not a finite number."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def as_metadata(value: Any) -> MetadataValue:
    """Return a single number, text or `None` unchanged, and anything else as JSON text."""
    value = to_plain(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return to_json(value, fallback=str).decode()
