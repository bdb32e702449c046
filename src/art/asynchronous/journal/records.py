"""What the journal of a pipeline keeps, as dataclasses, and how rollouts and groups become JSON and come back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

from art.asynchronous.plan import GroupPlan, RolloutOutcome
from art.storage.trajectories import parse_group
from art.trajectory import PydanticException, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A training step that was submitted or was about to be."""

    step: int
    """Checkpoint that the step starts from."""
    job_id: str
    """Id of the training job. The server runs it once, however often it is submitted."""
    numbers: tuple[int, ...]
    """Numbers of the groups that the step trains, in the order of its request."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The step's `TrainConfig` as JSON data, so that the same request can be sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup:
    """A group that was started and is not trained yet."""

    plan: GroupPlan
    rollouts: dict[int, RolloutOutcome]
    """Rollouts that ended, by index. It is empty once `groups` is known, which has them."""
    groups: list[TrajectoryGroup] | None
    """What `after_each` made of the finished group; `None` while its rollouts or its judge are not finished."""

    def exchange_ids(self) -> set[str]:
        """Return the ids of the exchanges (recorded answers) that its rollouts name."""
        rollouts = chain(self.rollouts.values(), *(self.groups or ()))
        return {one for rollout in rollouts for one in _exchange_ids(rollout)}

    def without(self, lost: Set[str]) -> KeptGroup:
        """Return it without the rollouts that name one of the exchanges in `lost`; with none if it was finished."""
        if self.groups is not None:
            return self if lost.isdisjoint(self.exchange_ids()) else replace(self, groups=None)
        rollouts = {i: one for i, one in self.rollouts.items() if lost.isdisjoint(_exchange_ids(one))}
        return replace(self, rollouts=rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where an earlier run of the pipeline ended."""

    next_number: int = 0
    """Number of the next group to start."""
    next_position: int = 0
    """Position of the next scenario in the stream."""
    chooser_state: Mapping[str, Any] = field(default_factory=dict)
    """State of what chooses scenarios, as it was last recorded."""
    groups: list[KeptGroup] = field(default_factory=list)
    """Groups that are not trained yet, in the order of their numbers."""
    pending: PendingStep | None = None
    evaluations: dict[int, dict[int, RolloutOutcome]] = field(default_factory=dict)
    """Evaluations that began and did not end: for each step, the rollouts that ended, by index."""


def _exchange_ids(rollout: RolloutOutcome) -> Iterator[str]:
    if isinstance(rollout, Trajectory):
        for history in (rollout, *rollout.additional_histories):
            for item in history.messages_and_choices:
                if (exchange_id := getattr(item, "exchange_id", None)) is not None:
                    yield exchange_id


def dump_plan(plan: GroupPlan) -> dict[str, Any]:
    return {one.name: getattr(plan, one.name) for one in fields(plan)} | {"reason": dict(plan.reason)}


def dump_outcome(outcome: RolloutOutcome) -> dict[str, Any]:
    """Return how a rollout ended as the fields of a record: `trajectory` or `error`."""
    if isinstance(outcome, Trajectory):
        return {"trajectory": _dump_trajectory(outcome, outcome.model_dump(mode="json"))}
    return {"error": outcome.model_dump(mode="json")}


def dump_group(group: TrajectoryGroup) -> dict[str, Any]:
    dumped = group.model_dump(mode="json")
    for trajectory, data in zip(group.trajectories, dumped["trajectories"], strict=True):
        _dump_trajectory(trajectory, data)
    return dumped


def _dump_trajectory(trajectory: Trajectory, data: dict[str, Any]) -> dict[str, Any]:
    """Leave out a reward that was never set: training tells it from a reward of 0."""
    if "reward" not in trajectory.model_fields_set:
        del data["reward"]
    return data


def load_outcome(record: Mapping[str, Any]) -> RolloutOutcome:
    if "error" in record:
        return PydanticException.model_validate(record["error"])
    group = parse_group({"trajectories": [record["trajectory"]]})  # a group knows the class of each trajectory
    return group.trajectories[0] if group.trajectories else group.exceptions[0]


def load_outcomes(records: Iterable[Mapping[str, Any]]) -> dict[int, RolloutOutcome]:
    return {record["index"]: load_outcome(record) for record in records if record["event"] == "rollout_ended"}


def load_kept(records: Iterable[Mapping[str, Any]]) -> KeptGroup:
    """Make a kept group of its records: the first is `started`, the others say what ended."""
    started, *others = records
    ended = [record for record in others if record["event"] == "group_ended"]
    groups = [parse_group(group) for group in ended[-1]["groups"]] if ended else None
    return KeptGroup(plan=GroupPlan(**started["plan"]), rollouts={} if ended else load_outcomes(others), groups=groups)


def dump_pending(pending: PendingStep) -> dict[str, Any]:
    return {one.name: getattr(pending, one.name) for one in fields(pending)} | {"config": dict(pending.config)}


def load_pending(data: Mapping[str, Any] | None) -> PendingStep | None:
    return None if data is None else PendingStep(**{**data, "numbers": tuple(data["numbers"])})
