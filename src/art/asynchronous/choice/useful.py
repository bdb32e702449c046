"""Counts the groups of a step that taught something, and what each of them cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from art.asynchronous.choice.spread import has_spread


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUse:
    """What came of one group."""

    rewards: Sequence[float]
    """Final rewards; empty for a group that was lost."""
    num_run: int
    """Rollouts that were started, failed ones included."""
    num_planned: int
    """Rollouts that the group would have had; more than `num_run` after an early stop."""
    is_extra: bool = False
    """Whether it rode along without spread, and another group took its place (`refill`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsefulGroups:
    """The groups of one step, and what they cost together.

    Example: 4 groups of 8 rollouts, 2 of them useful, 1 stopped after 4 rollouts, in 60 s: 14 rollouts and 30 s per
    useful group, and 4 rollouts saved.
    """

    groups: Sequence[GroupUse]
    tolerance: float = 0.0
    """The trainer's `spread_tolerance`."""

    def metrics(
        self, *, wall_s: float, sampled_tokens: float | None = None, usd: float | None = None
    ) -> dict[str, float]:
        """Return the metrics of the step.

        Args:
            wall_s: seconds since the step before.
            sampled_tokens: tokens that were sampled for the groups; `None` if unknown.
            usd: what the step cost; `None` if nothing was booked.
        """
        num_run = sum(group.num_run for group in self.groups)
        num_useful = sum(has_spread(group.rewards, self.tolerance) for group in self.groups)
        numbers = {
            "groups_useful_share": num_useful / max(1, len(self.groups)),
            "groups_extra": sum(group.is_extra for group in self.groups),
            "groups_stopped_early": sum(group.num_run < group.num_planned for group in self.groups),
            "groups_lost": sum(not group.rewards for group in self.groups),
            "rollouts_run": num_run,
            "rollouts_saved": sum(group.num_planned for group in self.groups) - num_run,
        }
        if num_useful:
            costs = {"rollouts": num_run, "seconds": wall_s, "tokens": sampled_tokens, "usd": usd}
            numbers |= {f"{name}_per_useful_group": cost / num_useful for name, cost in _known(costs.items())}
        return {f"pipeline/{name}": float(value) for name, value in numbers.items()}


def _known(costs: Iterable[tuple[str, float | None]]) -> list[tuple[str, float]]:
    return [(name, cost) for name, cost in costs if cost is not None]
