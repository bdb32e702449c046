"""Learning rates that change from step to step. A rate depends on the step's number only, so a resumed run goes on
where it was."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from art.config.base import Config, LearningRate
from art.errors import ConfigError

Shape = Literal["constant", "linear", "cosine"]


class ScheduleConfig(Config):
    """A learning rate by step: `warmup_steps` rise to `peak`, then it falls towards `min_ratio * peak`.

    Steps count from 0. The rate of step s of the warm-up is peak * (s + 1) / (warmup_steps + 1). After it, with
    t = (s - warmup_steps) / (total_steps - warmup_steps), at most 1, the rate is
    peak * (min_ratio + (1 - min_ratio) * f), where f is 1 - t for "linear", (1 + cos(pi t)) / 2 for "cosine" (SGDR,
    arXiv 1608.03983), and 1 for "constant".

    Example: peak=1e-4, warmup_steps=1, total_steps=3, "linear": 5e-5, 1e-4, 5e-5
    """

    type: Shape = "linear"
    """Shape of the rate after the warm-up."""
    peak: LearningRate
    """The largest rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps before the first one with the rate `peak`."""
    total_steps: int | None = Field(default=None, ge=1)
    """Step at which "linear" and "cosine" reach `min_ratio`. In supervised fine-tuning a step is a batch, and `None` is
    the number of batches of the call."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of `peak` that "linear" and "cosine" end at. With 0 there is no step `total_steps`: its rate would be 0."""

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.type == "constant" and (self.total_steps is not None or self.min_ratio):
            raise ValueError('a "constant" schedule does not fall: `total_steps` and `min_ratio` do not apply')
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"`warmup_steps` must be below `total_steps`; got {self.warmup_steps} of {self.total_steps}"
            )
        return self

    def rate_at(self, step: int, *, total_steps: int | None = None) -> float:
        """Return the learning rate of a step.

        Args:
            step: number of the step, from 0.
            total_steps: what `total_steps` is if it is not set.

        Raises:
            ConfigError: the schedule has ended, so the rate would be 0, or it does not know where it ends.
        """
        total = self.total_steps or total_steps
        if total is None and self.type != "constant":
            raise ConfigError(f'a "{self.type}" schedule needs `total_steps`', param="learning_rate")
        share = share_at(self.type, step, warmup_steps=self.warmup_steps, total_steps=total or 0)
        if share == 0.0 and self.min_ratio == 0.0:
            raise ConfigError(
                f"the learning rate is 0 at step {step}: its schedule ended at `total_steps`={total}. Set a larger "
                "`total_steps`, or `min_ratio` above 0 for steps after it",
                param="learning_rate",
            )
        if step < self.warmup_steps:
            return self.peak * share
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * share)


def share_at(shape: Shape, step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Return the share, from 0 to 1, of the way from the smallest rate to the peak at a step counted from 0.

    In the warm-up it is the share of the peak itself.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if shape == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(total_steps - warmup_steps, 1))
    return 1 - done if shape == "linear" else (1 + math.cos(math.pi * done)) / 2


def _kind(value: Any) -> str:
    if isinstance(value, (dict, ScheduleConfig)):
        return "[schedule]"
    return "[list]" if isinstance(value, (list, tuple)) else "[number]"


# Brackets keep the name of a member out of error messages.
AnyRate = Annotated[
    Annotated[LearningRate, Tag("[number]")] | Annotated[ScheduleConfig, Tag("[schedule]")],
    Discriminator(lambda value: "[schedule]" if _kind(value) == "[schedule]" else "[number]"),
]
"""A number, or a schedule."""
AnyRates = Annotated[
    Annotated[LearningRate, Tag("[number]")]
    | Annotated[list[Annotated[float, Field(ge=0, le=1)]], Tag("[list]")]
    | Annotated[ScheduleConfig, Tag("[schedule]")],
    Discriminator(_kind),
]
"""A number, a number for each batch, or a schedule over the batches."""
