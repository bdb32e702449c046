"""The description of a metric."""

from __future__ import annotations

from dataclasses import dataclass

ALWAYS = "every step"


@dataclass(frozen=True, slots=True)
class Metric:
    """What a metric means, and in which steps it is reported."""

    meaning: str
    when: str = ALWAYS
