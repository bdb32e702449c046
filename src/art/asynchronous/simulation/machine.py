"""What a simulated run has: an engine, a trainer, workers for tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Speeds and limits of the machines of a run. `None` is no limit.

    Example: 64 requests at once make each of them 4.5 times slower than a single one
        Machine(train_s=1.5, slowdown=3.5 / 63)
    """

    train_s: float
    """Seconds of a training step, including the way there and the checkpoint."""
    publish_s: float = 0.0
    """Seconds from the end of training until requests use the checkpoint."""
    seats: int | None = None
    """Number of requests that the engine computes at once; further ones wait."""
    slowdown: float = 0.0
    """How much longer each request takes for every further request at once, as a share of its time alone."""
    max_concurrent: int | None = None
    """Number of rollouts that run at once. The oldest groups go first."""
    tool_workers: int | None = None
    """Number of tools with `worker_s` that run at once."""
    alternates: bool = False
    """Whether the engine stops while a step is trained, as on a single GPU."""
    switch_s: float = 0.0
    """With `alternates`: seconds that putting the engine to sleep and waking it add to each step."""

    @property
    def step_s(self) -> float:
        """Seconds from the beginning of a step until requests use its checkpoint."""
        return self.train_s + self.publish_s + (self.switch_s if self.alternates else 0.0)
