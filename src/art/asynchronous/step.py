"""`PipelineStep`: what one step of a pipeline did, and who waited for whom."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from art.metrics.scores import Estimate
from art.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTiming:
    """Wall time of one step in seconds. Rollouts and training overlap, so the parts add up to more than the whole."""

    wall_s: float = 0.0
    """From the end of the step before, or the beginning of the call of `train`, to the end of this step."""
    waited_for_rollouts_s: float = 0.0
    """Part of `wall_s` in which the trainer had nothing to do, because groups were missing."""
    train_s: float = 0.0
    """Part of `wall_s` for the training job, from the request to the new checkpoint being served."""
    held_s: float = 0.0
    """Part of `wall_s` in which no further group could start, because it would have been too stale when trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEvaluation:
    """Rewards of one checkpoint on held-out scenarios."""

    step: int
    """The checkpoint. Training went on meanwhile, so it may be older than the newest."""
    mean: float
    """Mean reward; NaN if every rollout failed."""
    interval: tuple[float, float]
    """95 % interval of the mean: Wilson's if all rewards are 0 or 1, else Student's t."""
    change: Estimate | None
    """Change of the reward since the pipeline's first evaluation, with its 95 % interval; each scenario is compared
    with itself. `None` for the first evaluation, and if they have no scenario in common."""
    trajectories: Sequence[Trajectory]
    """The rollouts that did not fail, in the order of the scenarios."""
    seconds: float
    """Wall time of the rollouts."""

    def text(self) -> str:
        """Return the evaluation as a few words."""
        low, high = self.interval
        change = "" if self.change is None else f", change {self.change.text(sign=True)}"
        return f"evaluation of checkpoint {self.step}: {self.mean:.3f} (95 %: {low:.3f} to {high:.3f}){change}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    """What one training step did. `async for step in pipeline.train(...)` yields them."""

    number: int
    """Step of the newest checkpoint afterwards."""
    trained: bool
    """Whether the step made that checkpoint. If not, there was nothing to learn from its groups."""
    groups: Sequence[TrajectoryGroup]
    """The groups that the step was given, oldest first."""
    reward: float
    """Mean reward of their rollouts."""
    staleness_mean: float = 0.0
    """Mean over the groups of the checkpoint that the step started from, minus the one that the group began with."""
    staleness_max: int = 0
    """Largest staleness of a group; never above `max_staleness`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics of the step, as they were logged."""
    findings: Sequence[str] = ()
    """What is unusual about the step, in sentences (docs/metrics.md), and which rollouts it waited for too long."""
    timing: PipelineTiming = PipelineTiming()
    evaluations: Sequence[PipelineEvaluation] = ()
    """Evaluations that have ended since the step before, in the order of their checkpoints."""

    @property
    def evaluation(self) -> PipelineEvaluation | None:
        """The newest evaluation that has ended since the step before; `None` if none has."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def trained_share(self) -> float:
        """Share of the sampled tokens that were trained on, from the ledger; NaN if the step was not trained."""
        sampled = self.metrics.get("ledger/sampled_tokens", 0.0)
        return self.metrics.get("ledger/trained_tokens", 0.0) / sampled if sampled else math.nan

    def line(self) -> str:
        """Return the step as a line of text: reward, staleness, who waited for whom, and the ledger."""
        timing, ledger = self.timing, self.trained_share
        parts = [
            f"step {self.number:>4}",
            f"reward {self.reward:+.3f}",
            f"staleness {self.staleness_mean:.1f} (max {self.staleness_max})",
            f"{timing.wall_s:.1f} s",
            f"training {timing.train_s:.1f} s",
            f"waited for rollouts {timing.waited_for_rollouts_s:.1f} s",
            f"rollouts held {timing.held_s:.1f} s",
        ]
        if not math.isnan(ledger):
            parts.append(f"{ledger:.0%} of {self.metrics['ledger/sampled_tokens']:,.0f} tokens trained")
        if not self.trained:
            parts.append("(nothing to learn: not trained)")
        parts += [evaluation.text() for evaluation in self.evaluations]
        return "  ".join(parts)


def now() -> float:
    """Return the time of the running event loop in seconds."""
    return asyncio.get_running_loop().time()


class Stopwatch:
    """Adds up the seconds in which something is the case."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = None

    def set(self, is_so: bool) -> None:
        """Say whether it is the case from now on."""
        if is_so == (self._since is not None):
            return
        if self._since is not None:
            self._total_s += now() - self._since
        self._since = now() if is_so else None

    def lap(self) -> float:
        """Return the seconds since the last call of `lap`, and begin again."""
        running = self._since is not None
        self.set(False)
        total_s, self._total_s = self._total_s, 0.0
        self.set(running)
        return total_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: it is the case during the body."""
        self.set(True)
        try:
            yield
        finally:
            self.set(False)
