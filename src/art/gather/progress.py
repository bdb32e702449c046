"""The progress bar of a gather, with running means of rewards and metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from art.trajectory import Trajectory, finite_number


@dataclass(eq=False)
class Progress:
    """Sums of the metrics of finished rollouts, and the bar that shows their means."""

    pbar: Any = None
    max_metrics: int | None = None
    """Number of metrics that the bar shows beside the reward; `None` for all."""
    metric_sums: Counter[str] = field(default_factory=Counter)
    """Sum of each metric; `exceptions` counts failures."""
    metric_divisors: Counter[str] = field(default_factory=Counter)
    """Number of rollouts that had the metric."""

    @property
    def num_exceptions(self) -> int:
        return int(self.metric_sums["exceptions"])

    def add_trajectory(self, trajectory: Trajectory) -> None:
        """Add a rollout's reward and metrics to the sums; values that are not finite numbers are left out."""
        for name, value in {"reward": trajectory.reward, **trajectory.metrics}.items():
            if (number := finite_number(value)) is not None:
                self.metric_sums[name] += number  # type: ignore[assignment]
                self.metric_divisors[name] += 1

    def add(self, part: Progress) -> None:
        self.metric_sums.update(part.metric_sums)
        self.metric_divisors.update(part.metric_divisors)

    def reset(self) -> None:
        self.metric_sums.clear()
        self.metric_divisors.clear()

    def show(self, n: int) -> None:
        """Advance the bar by `n` and show the means, with the number of rollouts where not all have the metric."""
        if self.pbar is None:
            return
        names = [name for name in self.metric_divisors if name != "reward"][: self.max_metrics]
        shown = ["reward", *names] if "reward" in self.metric_divisors else names
        means: dict[str, Any] = {name: self.metric_sums[name] / self.metric_divisors[name] for name in shown}
        most = max(self.metric_divisors.values(), default=0)
        means |= {
            name: f"{means[name]:.3g} ({count} of {most})"
            for name in shown
            if (count := self.metric_divisors[name]) < most
        }
        if self.num_exceptions:
            means["exceptions"] = self.num_exceptions
        self.pbar.set_postfix(means, refresh=False)
        self.pbar.update(n)
