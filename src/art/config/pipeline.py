"""Settings of `art.pipeline`, which trains while further rollouts run."""

from __future__ import annotations

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
    curriculum: bool = False
    """Choose scenarios by the chance that their next group has spread, estimated from their groups so far, instead of
    one after the other. Needs a list of scenarios that is gone through several times. A tenth of the groups goes to
    the scenario that waited the longest, so none is forgotten."""
    rollout_timeout_s: float | None = Field(default=1800.0, gt=0)
    """Seconds after which a rollout is cancelled and counts as failed; `None` waits for ever. Half an hour is longer
    than nearly every agent needs, and an agent that hangs delays the step that waits for it by no more than this."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of scenarios, and of the random numbers of rollouts."""
    shuffle: bool = True
    """Go through a list of scenarios in a random order, another in each pass. `False` keeps the order of the list."""
    max_fault_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of the last 64 rollouts that may fail through no fault of the policy. Above it the training ends with an
    error, because a machine or a program is broken."""

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.curriculum and self.rollouts_per_group < 2:
            raise ValueError(
                "`curriculum` chooses by the spread of rewards within a group, and groups of one rollout have none; "
                "expected `rollouts_per_group` of 2 or more"
            )
        return self
