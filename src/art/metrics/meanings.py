"""Say what a metric means, by its full name."""

from __future__ import annotations

from collections.abc import Mapping

from art.metrics.catalogue import (
    FAULT_METRICS,
    JOB_METRICS,
    LOG_METRICS,
    PLAN_METRICS,
    SFT_METRICS,
    TRAINER_METRICS,
    TREND_METRICS,
    Metric,
)
from art.metrics.groups import SECTIONS

_ALL: Mapping[str, Metric] = {
    **LOG_METRICS, **FAULT_METRICS, **JOB_METRICS, **TREND_METRICS, **SFT_METRICS, **PLAN_METRICS, **TRAINER_METRICS,
}  # fmt: skip
_PATTERNS = sorted((name for name in _ALL if name.endswith("*")), key=len, reverse=True)
"""Names that end in `*` are for all that begin like them; the longest counts."""
_OF_GROUPS = {
    "reward": "mean reward of the rollouts",
    "reward_std_dev": "mean over groups of the standard deviation of their rewards",
    "exception_rate": "share of the rollouts that failed",
}


def meaning_of(name: str) -> str | None:
    """Return what a metric means; `None` for a metric of the user.

    Example: `ledger/dropped_tokens/truncated` means "number of sampled tokens left out, by reason".
    """
    if name in _ALL:
        return _ALL[name].meaning
    if (pattern := next((pattern for pattern in _PATTERNS if name.startswith(pattern[:-1])), None)) is not None:
        return _ALL[pattern].meaning
    split, _, key = name.partition("/")
    return None if split in SECTIONS else _OF_GROUPS.get(key)
