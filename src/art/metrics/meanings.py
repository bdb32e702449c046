"""Say what a metric means, by its full name."""

from __future__ import annotations

from art.metrics.catalogue import CATALOGUE
from art.metrics.groups import SECTIONS

_PATTERNS = sorted((name for name in CATALOGUE if name.endswith("*")), key=len, reverse=True)
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
    if name in CATALOGUE:
        return CATALOGUE[name].meaning
    if (pattern := next((pattern for pattern in _PATTERNS if name.startswith(pattern[:-1])), None)) is not None:
        return CATALOGUE[pattern].meaning
    split, _, key = name.partition("/")
    return None if split in SECTIONS else _OF_GROUPS.get(key)
