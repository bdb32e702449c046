"""Plans of groups and rollouts, with the seeds that follow from their place in the stream of scenarios.

plan = GroupPlan(number=5, position=5, scenario_id="17", pass_number=0, policy_version=2, seed=..., num_rollouts=8)
[rollout.seed for rollout in plan.rollouts()]     # eight seeds, the same in every run
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from art.client.rollout_context import derive_seed
from art.trajectory import PydanticException, Trajectory

RolloutOutcome = Trajectory | PydanticException
"""How a rollout ended: with a trajectory, or with the record of its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """One rollout that is to be run."""

    group: int
    """Number of its group."""
    index: int
    """Index in its group, from 0."""
    seed: int
    """Seed of its sampling, in [0, 2^63)."""

    @property
    def order(self) -> tuple[int, int]:
        """Key by which rollouts wait for a slot: the oldest group first."""
        return self.group, self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One group that is to be run, and where it comes from."""

    number: int
    """Number in the order of starting, from 0."""
    position: int
    """Position in the stream of scenarios, from 0."""
    scenario_id: str
    """Name of the scenario, the same in every run."""
    pass_number: int
    """How often the list of scenarios was gone through before; 0 for an endless stream."""
    policy_version: int
    """Step of the newest checkpoint when the group started. With in_flight="finish" all its tokens are from there."""
    seed: int
    """Seed from which those of its rollouts follow."""
    num_rollouts: int
    """Rollouts that the group has when it is complete."""
    reason: Mapping[str, float | str] = field(default_factory=dict)
    """Why the scenario was chosen, by whatever chose it."""

    def rollouts(self) -> list[RolloutPlan]:
        """Return the plans of all rollouts. They are the same in every run, so an interrupted one can start again."""
        return [self.rollout(index) for index in range(self.num_rollouts)]

    def rollout(self, index: int) -> RolloutPlan:
        """Return the plan of rollout `index`."""
        return RolloutPlan(group=self.number, index=index, seed=derive_seed(self.seed, index))

    def started_at(self, version: int) -> Self:
        """Return the plan of the same group, for a start with another checkpoint."""
        return replace(self, policy_version=version)


def group_seed(pipeline_seed: int, position: int) -> int:
    """Return the seed of the group at a position of the stream of scenarios, in [0, 2^63)."""
    return derive_seed("group", pipeline_seed, position)
