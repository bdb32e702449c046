"""Where older code looks for `MetricsBuilder` and `track_api_cost`."""

from art.compat.metrics import MetricsBuilder, track_api_cost

__all__ = ["MetricsBuilder", "track_api_cost"]
