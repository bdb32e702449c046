"""Looking up a reported metric in the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from art.metrics.catalogue import Metric


def find_metric(name: str, metrics: Mapping[str, Metric]) -> Metric | None:
    """The entry of `metrics` for a metric's full name; keys may end in `*`."""
    return metrics.get(name) or next((metrics[key] for key in metrics if fnmatchcase(name, key)), None)
