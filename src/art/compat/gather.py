"""Options of the gather functions that only older code passes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, TypedDict


class OlderOptions(TypedDict, total=False):
    """Keyword arguments of older code that the gather functions accept and ignore."""

    pbar_total_completion_tokens: bool
    """Has no effect; the progress bar shows `completion_tokens` where it is known."""


def check_older_options(options: Mapping[str, Any]) -> None:
    """Warn about options of the gather functions that only older code passes, and that have no effect.

    Raises:
        TypeError: the option never existed.
    """
    if unknown := sorted(options.keys() - OlderOptions.__annotations__.keys()):
        raise TypeError(f"unknown option {', '.join(unknown)}")
    if options.get("pbar_total_completion_tokens"):
        warnings.warn(
            "pbar_total_completion_tokens is deprecated and does nothing; leave it out",
            DeprecationWarning,
            stacklevel=3,
        )
