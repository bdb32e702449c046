"""Settings of `art.pipeline`, which trains while further rollouts run."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from art.config.base import Config


class PipelineConfig(Config):
    """Settings of `art.pipeline`: sizes of groups and steps, how far rollouts may run ahead, and what is repeated."""

    rollouts_per_group: int = Field(default=8, ge=1)
    """Rollouts of one scenario, whose rewards are compared with each other. 8 is the middle of what GRPO runs use (4 to
    16): fewer make the group's mean a poor baseline, and more cost rollouts of scenarios that are seen already."""
    groups_per_step: int = Field(default=16, ge=1)
    """Groups that one training step takes, the default of tasks too. Smaller steps follow each other faster and have
    noisier gradients."""
    max_staleness: int = Field(default=1, ge=0)
    """Most steps between the checkpoint that a rollout began with and the one that its training step starts from. 0
    never samples ahead: each step waits for its rollouts, and they wait for it. 1 overlaps rollouts with training
    and is safe with every loss; 2 also hides most of the slowest rollouts. Above 4, ART demands a loss with a trust
    region (arXiv 2505.24298 and NVIDIA's NeMo-RL #1098 measured where quality is lost)."""
    in_flight: Literal["finish", "switch"] = "finish"
    """What a running rollout does when a step is published. "finish": it ends with the checkpoint that it began with,
    which adapters make free. "switch": it goes on with the new weights, and each token is trained with the version that
    sampled it; engines that hold a single policy need this."""
    max_concurrent: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Most rollouts that run at once. "auto" follows the engine's load, because more requests than its seats only wait
    in its queue; `None` starts every rollout that the staleness allows, for agents that hardly use the engine."""
    refill: float = Field(default=0.0, ge=0, le=4)
    """Further groups that a step may get in place of those without spread in their rewards, as a share of
    `groups_per_step`. 0 trains on the groups as they come, as a loop of your own would. 0.5 costs at most half as many
    rollouts again, and keeps steps full where many scenarios are solved always or never."""
    early_stop: int | None = Field(default=None, ge=2)
    """Rollouts after which a group ends early if they all earned the same; the others of the group are not run. `None`
    runs them all, because a group that looks decided may still have spread."""
    curriculum: bool = False
    """Choose scenarios by the chance that their next group has spread, estimated from their groups so far, instead of
    one after the other. Needs a list of scenarios that is gone through several times."""
    curriculum_floor: float = Field(default=0.1, gt=0, le=1)
    """Share of the groups that go to the scenario that waited the longest, whatever it is worth: with N scenarios each
    is chosen at least once in N / `curriculum_floor` groups. 0.1 is the share that Prioritized Level Replay gives to
    the time since a level was last played (arXiv 2010.03934)."""
    rollout_timeout_s: float | None = Field(default=1800.0, gt=0)
    """Seconds after which a rollout is cancelled and counts as failed; `None` waits for ever. Half an hour is longer
    than nearly every agent needs, and an agent that hangs delays the step that waits for it by no more than this."""
    every: int = Field(default=20, ge=1)
    """Steps between two evaluations, if there are scenarios to evaluate on. The first is of the checkpoint that the
    training begins with, and the last of the one that it ends with."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of scenarios, and of the random numbers of rollouts."""
    shuffle: bool = True
    """Go through a list of scenarios in a random order, another in each pass. `False` keeps the order of the list."""
    max_fault_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of the last 64 rollouts that may fail through no fault of the policy. Above it the training ends with an
    error, because a machine or a program is broken."""
    max_barren_steps: int = Field(default=5, ge=1)
    """Steps in a row without anything to learn after which the training ends: the policy collapsed or is perfect."""
    report_after_s: float = Field(default=60.0, gt=0)
    """Seconds that a step waits for rollouts before the log names those that it waits for."""

    @property
    def max_extras(self) -> int:
        """Most groups without spread that ride along in a step in addition to its `groups_per_step`."""
        return math.floor(self.refill * self.groups_per_step + 1e-9)

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.refill and not self.max_extras:
            raise ValueError(
                f"`refill` = {self.refill:g} of {self.groups_per_step} groups is less than one group, so it does "
                f"nothing; expected at least {1 / self.groups_per_step:g}, or 0 for no refill"
            )
        if self.curriculum and self.rollouts_per_group < 2:
            raise ValueError(
                "`curriculum` chooses by the spread of rewards within a group, and groups of one rollout have none; "
                "expected `rollouts_per_group` of 2 or more"
            )
        if "curriculum_floor" in self.model_fields_set and not self.curriculum:
            raise ValueError("`curriculum_floor` does nothing without `curriculum=True`")
        if self.early_stop is not None and self.early_stop >= self.rollouts_per_group:
            raise ValueError(
                f"`early_stop` = {self.early_stop} saves nothing in groups of {self.rollouts_per_group} rollouts; "
                "expected a smaller number, or `None`"
            )
        return self
