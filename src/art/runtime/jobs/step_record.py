"""Write the plan record of a training job when it ends: what became of each rollout.

A record that cannot be written never fails a step; the step then has a finding that says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from art.credit.ledger import CONSTRAINT_MISMATCH, SAMPLER_MISMATCH
from art.credit.plan import StepPlan
from art.errors import StorageError
from art.runtime.jobs.job import Job
from art.runtime.jobs.work import Done
from art.storage.steps.plan_record import GroupPlan, PlanRecord, write_plan
from art.storage.steps.token_file import TokenFile

_log = logging.getLogger(__name__)


def record_plan(folder: Path, job: Job, plan: StepPlan, done: Done, *, from_step: int) -> list[str]:
    """Write the record of `job` to `folder`, the folder of the step at which the model is now.

    Returns:
        Findings: why the record could not be written, or nothing.
    """
    ledger = {name: value for name, value in done.changes["metrics"].items() if name.startswith("ledger/")}
    trained = done.changes["trained"]
    dropped = _read_dropped(folder, job.job_id) if trained else None
    record = PlanRecord(
        job_id=job.job_id,
        kind="train_sft" if job.kind == "train_sft" else "train",
        created_at=time.time(),
        from_step=from_step,
        step=done.changes["step"],
        trained=trained,
        ledger=ledger,
        has_token_file=dropped is not None,
        groups=[_drop(group, dropped or {}) for group in plan.groups] if trained else _untrained(plan.groups, ledger),
    )
    try:
        write_plan(folder, record)
    except StorageError as error:
        _log.warning("the plan of step %d of %s is not recorded: %s", record.step, job.model_key, error)
        return [f"the record of which rollouts the step was given could not be written: {error}"]
    return []


def _read_dropped(folder: Path, job_id: str) -> dict[str, dict[str, int]] | None:
    """Count what the trainer dropped of each rollout, by label and reason; `None` if the job has no token file."""
    try:
        tokens = TokenFile(folder)
        return tokens.count_dropped() if tokens.job_id == job_id else None
    except StorageError:
        return None


def _drop(group: GroupPlan, dropped: Mapping[str, Mapping[str, int]]) -> GroupPlan:
    """Return the group with the tokens that the trainer dropped, which count as trained in the plan."""
    rollouts = list(group.rollouts)
    for place, rollout in enumerate(rollouts):
        for reason, num_tokens in dropped.get(rollout.label, {}).items():
            rollouts[place] = rollouts[place].drop(reason, num_tokens)
    return group.model_copy(update={"rollouts": rollouts})


def _untrained(groups: Sequence[GroupPlan], ledger: Mapping[str, float]) -> list[GroupPlan]:
    """Return the groups of a job that trained nothing. What was planned to be trained, the trainer has refused."""
    of_constraints = f"ledger/dropped_tokens/{CONSTRAINT_MISMATCH}" in ledger
    reason = CONSTRAINT_MISMATCH if of_constraints else SAMPLER_MISMATCH
    planned = {rollout.label: rollout.trained_tokens for group in groups for rollout in group.rollouts}
    return [_drop(group, {label: {reason: count} for label, count in planned.items() if count}) for group in groups]
