"""Records trajectories of code that keeps no record itself; `art.capture` is the function of that name."""

from art.capture.captured import Captured
from art.capture.context import (
    auto_trajectory,
    capture,
    capture_auto_trajectory,
    capture_yielded_trajectory,
    current_capture,
    yield_trajectory,
)

__all__ = [
    "Captured",
    "auto_trajectory",
    "capture",
    "capture_auto_trajectory",
    "capture_yielded_trajectory",
    "current_capture",
    "yield_trajectory",
]
