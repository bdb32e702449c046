"""What training did with rollouts, from the plan records of a step; and the rollouts of steps that nobody logged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson

from art.gateway.record.recorder import Exchange, Recorder
from art.gateway.record.rollout_histories import rollout_histories
from art.storage.database import Database
from art.storage.steps.plan_record import RolloutPlan, read_plans
from art.viewer.conversation import Row
from art.viewer.database import ReadOnlyDatabase


class Fate(NamedTuple):
    """What training did with one rollout."""

    advantage: float | None
    is_trained: bool
    dropped_because: str | None
    num_tokens: int
    """Tokens that the model sampled."""


class PlannedRollout(NamedTuple):
    """One rollout of a step that nobody logged."""

    group: int
    """Number of the group, over all jobs that ended at the step, the oldest first."""
    place: int
    """Place in the group."""
    plan: RolloutPlan

    @property
    def exchange_ids(self) -> list[str]:
        return exchanges_of(self.plan)


def exchanges_of(plan: RolloutPlan) -> list[str]:
    """Return the ids of the exchanges of a rollout, each once."""
    return list(dict.fromkeys(chain.from_iterable(plan.exchange_ids)))


def fate_of(plan: RolloutPlan) -> Fate:
    """Describe what training did with a rollout."""
    return Fate(
        advantage=plan.advantage,
        is_trained=plan.trained_tokens > 0,
        dropped_because=plan.dropped_because,
        num_tokens=plan.trained_tokens + sum(plan.dropped_tokens.values()),
    )


def read_fates(folder: Path) -> dict[str, Fate]:
    """Read the plan records of a step, by exchange. Where several jobs had a rollout, the newest one counts."""
    fates: dict[str, Fate] = {}
    for record in read_plans(folder):
        for plan in chain.from_iterable(group.rollouts for group in record.groups):
            fates |= dict.fromkeys(exchanges_of(plan), fate_of(plan))
    return fates


def planned_rollouts(folder: Path) -> Iterator[PlannedRollout]:
    """Yield the rollouts of all jobs that ended at a step."""
    number = 0
    for record in read_plans(folder):
        for group in record.groups:
            for index, plan in enumerate(group.rollouts):
                yield PlannedRollout(number, index, plan)
            number += 1


def find_exchanges(database: ReadOnlyDatabase, ids: Iterable[str]) -> dict[str, Exchange]:
    """Return the recorded exchanges among `ids`, by id. Old ones may have been deleted."""
    # The recorder only reads here, and needs no more of its database than that.
    return Recorder(cast("Database", database)).find(ids)


def as_trajectory(database: ReadOnlyDatabase, rollout: PlannedRollout, exchanges: dict[str, Exchange]) -> Row:
    """Build the trajectory of a rollout from the record, in the form of a logged one."""
    recorded = [exchanges[i] for i in rollout.exchange_ids if i in exchanges]
    histories: list[Row] = rollout_histories(recorded) if recorded else []
    first: Row = histories[0] if histories else {"messages_and_choices": [], "tools": None}
    trajectory: Row = {**first, "additional_histories": histories[1:], "reward": rollout.plan.reward, "metrics": {}}
    trajectory["metadata"] = {}
    if recorded and recorded[0].rollout_id is not None:
        trajectory |= _announced(database, recorded[0].project, recorded[0].rollout_id)
    if recorded:
        trajectory["initial_policy_version"] = recorded[0].policy_version
    return trajectory


def _announced(database: ReadOnlyDatabase, project: str, rollout_id: str) -> dict[str, Any]:
    """What another program told about its rollout, as fields of a trajectory."""
    rows = database.read(
        "SELECT scenario_id, outcome, metrics, metadata FROM rollouts WHERE project = ? AND id = ?",
        (project, rollout_id),
    )
    if not rows:
        return {"metadata": {"rollout_id": rollout_id}}
    scenario, outcome, metrics, metadata = rows[0]
    known = {"rollout_id": rollout_id, "scenario_id": scenario, "outcome": outcome}
    told = {key: value for key, value in known.items() if value is not None}
    return {"metrics": orjson.loads(metrics), "metadata": {**orjson.loads(metadata), **told}}
