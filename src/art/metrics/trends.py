"""Trends over several steps: whether the reward rises, whether the policy loses the format of its answers.

    metrics of this step and of those before it --measure_trends--> `trend/...` metrics --> rules of `findings.py`

Only steps of reinforcement learning have trends.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

WINDOW = 20
"""Number of steps for the trend of the reward, including the current one. In ten steps of 128 rollouts, the rise of a
run that learns often hides in the scatter."""
RUN_STEPS = 1000
"""Most steps that count as the whole run."""
FORMAT_WINDOW = 10
"""Number of steps for the trend of malformed rollouts."""
RECENT = 3
"""Number of last steps whose share of malformed rollouts is compared with that of the steps before them."""
FEWEST_FOR_MALFORMED = RECENT + 2
"""Fewest steps for the trend of malformed rollouts."""
SWING_WINDOW = 6
"""Number of last steps over which swings in the length of rollouts are measured."""

_LENGTHS = {
    "trend/answers_swing": "data/step_answers_per_rollout",
    "trend/tokens_swing": "data/step_tokens_per_rollout",
}


def measure_trends(metrics: Mapping[str, float], earlier: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Compute the trends at a step. Trends for which there are too few steps are left out.

    Args:
        metrics: metrics of the step.
        earlier: metrics of the steps that it continues without a gap, oldest first; up to `RUN_STEPS` - 1 count.
    """
    run = [row for row in [*earlier, metrics][-RUN_STEPS:] if "data/reward_mean" in row]
    rows = [*earlier, metrics][-WINDOW:]
    if any("data/reward_mean" not in row for row in rows):
        return {}
    trends: dict[str, float] = {}
    if len(rows) == WINDOW:
        rise, error = _fit_rise([row["data/reward_mean"] for row in rows])
        run_rise, run_error = _fit_rise([row["data/reward_mean"] for row in run])
        rates = [row.get("loss/learning_rate", 0.0) for row in run]
        trends |= {
            "trend/reward_rise": rise,
            "trend/reward_rise_error": error,
            "trend/run_rise": run_rise,
            "trend/run_rise_error": run_error,
            "trend/learning_rate_share": rates[-1] / max(rates) if max(rates) > 0 else 1.0,
            "trend/groups_trainable_share": _mean_share(
                rows, "data/step_num_groups_trainable", "data/step_num_groups_submitted"
            ),
            "trend/top_reward_share": _mean_share(rows, "data/reward_hist/9", "data/step_num_trajectories"),
        }
    malformed = [
        row["data/step_malformed_share"] for row in rows[-FORMAT_WINDOW:] if "data/step_malformed_share" in row
    ]
    if len(malformed) >= FEWEST_FOR_MALFORMED:
        recent, before = malformed[-RECENT:], malformed[:-RECENT]
        trends["trend/malformed_rise"] = statistics.fmean(recent) - statistics.fmean(before)
    for name, length in _LENGTHS.items():
        lengths = [row[length] for row in rows if length in row][-SWING_WINDOW:]
        if len(lengths) == SWING_WINDOW:
            trends[name] = _swing(lengths)
    return trends


def _fit_rise(values: Sequence[float]) -> tuple[float, float]:
    """The rise of a line fitted to `values` by least squares, from the first to the last value, and its standard error.

    Example: 0, 1, 2, 3 rise by 3, with an error of 0.
    """
    count = len(values)
    places = [place - (count - 1) / 2 for place in range(count)]
    mean = statistics.fmean(values)
    spread = math.fsum(place**2 for place in places)
    slope = math.fsum(place * (value - mean) for place, value in zip(places, values, strict=True)) / spread
    residuals = [value - mean - slope * place for place, value in zip(places, values, strict=True)]
    variance = math.fsum(residual**2 for residual in residuals) / (count - 2)
    return slope * (count - 1), math.sqrt(variance / spread) * (count - 1)


def _mean_share(rows: Sequence[Mapping[str, float]], part: str, whole: str) -> float:
    return statistics.fmean(row.get(part, 0.0) / row[whole] if row.get(whole) else 0.0 for row in rows)


def _swing(values: Sequence[float]) -> float:
    """How much `values` go up and down: mean absolute change minus the total change per step, divided by the mean.

    Example: 5, 3, 5, 3, 5, 3 swing by 0.4. 1, 2, 3, 4, 5, 6 only grow, and swing by 0.
    """
    changes = math.fsum(abs(later - value) for value, later in itertools.pairwise(values))
    mean = statistics.fmean(values)
    return (changes - abs(values[-1] - values[0])) / (len(values) - 1) / mean if mean > 0 else 0.0
