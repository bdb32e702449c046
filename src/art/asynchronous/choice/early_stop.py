"""Ends a group early whose first rollouts all earned the same: the others are not run.

The first k of n rollouts, by their index, are run alone. If all of them earned the same, the group ends; otherwise the
other n - k are run too. It is the first by index and not the first to end, because short rollouts end first, and often
are the failed ones.

What it costs, for a scenario that is solved with chance p and rewards of 0 and 1:

    rollouts that are run              k + (n - k) U(k),   with U(m) = 1 - p^m - (1-p)^m
    groups with spread, of all         U(k), where without early stop it is U(n)
    groups with spread that are lost   U(n) - U(k)

It is biased. Of scenarios that are hardly ever solved (or hardly ever failed) it keeps k/n of the groups with spread:
rare successes become rarer in training, and nothing corrects the weight of those that are left. At n = 8 and k = 4 a
scenario with p = 0 or 1 costs half, one with p = 0.1 gives 10 % fewer useful groups per rollout than without early
stop, and one with p = 0.5 gives 6 % fewer. So it pays where most groups have no spread, and costs a little elsewhere.
It also runs a group in two rounds, one after the other, which takes up to twice the time: the pipeline hides that only
with a staleness above 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from art.asynchronous.choice.spread import has_spread


def stops_early(first: Sequence[float | None], early_stop: int, tolerance: float = 0.0) -> bool:
    """Return whether a group ends after its first rollouts.

    Args:
        first: rewards of the first `early_stop` rollouts by index; `None` for one that failed. A group with a failed
            one goes on: what it would have earned is not known.
        tolerance: the trainer's `spread_tolerance`.
    """
    rewards = [reward for reward in first if reward is not None]
    return len(rewards) >= early_stop and not has_spread(rewards, tolerance)
