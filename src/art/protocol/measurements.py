"""What a server measures of itself, as the parts that know it hand it to `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number, now.

    Example: Measurement("art_process_restarts_total", 2.0, {"process": "engine of Qwen3-0.6B"})
    """

    name: str
    """One of `server.metrics.FAMILIES`."""
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
