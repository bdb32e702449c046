"""Metrics: the catalogue of their meanings, findings that explain a step in plain words, and summaries of groups.

`MetricsBuilder` and `track_api_cost` can be imported from here by code that was written for ART 0.3 to 0.5.
"""

from typing import Any

from art.plugins import load_plugin


def __getattr__(name: str) -> Any:
    if name not in ("MetricsBuilder", "track_api_cost"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load_plugin("art.names", f"metrics.{name}")
