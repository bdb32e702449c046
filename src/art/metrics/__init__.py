"""Metrics: what each one means, what a step's metrics say in plain words, and the numbers of a set of groups.

`MetricsBuilder` and `track_api_cost` are here for code written for ART 0.3 to 0.5, which imports them from here.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("MetricsBuilder", "track_api_cost"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from art.compat import metrics  # the server reads this package and needs no ledger of costs

    return getattr(metrics, name)
