"""Write the plan record of a training job when it ends: what became of each rollout.

A record that cannot be written never fails a step; the step then has a finding that says so.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from art.credit.ledger import CONSTRAINT_MISMATCH, SAMPLER_MISMATCH
from art.credit.plan import StepPlan
from art.errors import StorageError
from art.runtime.jobs.job import Job
from art.runtime.jobs.work import Done
from art.storage.steps.plan_record import GroupPlan, PlanRecord, RolloutPlan, write_plan

_log = logging.getLogger(__name__)


def record_plan(folder: Path, job: Job, plan: StepPlan, done: Done, *, from_step: int) -> list[str]:
    """Write the record of `job` to `folder`, the folder of the step at which the model is now.

    Returns:
        Findings: why the record could not be written, or nothing.
    """
    ledger = {name: value for name, value in done.changes["metrics"].items() if name.startswith("ledger/")}
    record = PlanRecord(
        job_id=job.job_id,
        kind="train_sft" if job.kind == "train_sft" else "train",
        created_at=time.time(),
        from_step=from_step,
        step=done.changes["step"],
        trained=done.changes["trained"],
        ledger=ledger,
        groups=plan.groups if done.changes["trained"] else [_untrained(group, ledger) for group in plan.groups],
    )
    try:
        write_plan(folder, record)
    except StorageError as error:
        _log.warning("the plan of step %d of %s is not recorded: %s", record.step, job.model_key, error)
        return [f"the record of which rollouts the step was given could not be written: {error}"]
    return []


def _untrained(group: GroupPlan, ledger: dict[str, float]) -> GroupPlan:
    """Return the group of a job that trained nothing. What was planned to be trained, the trainer has refused."""
    of_constraints = f"ledger/dropped_tokens/{CONSTRAINT_MISMATCH}" in ledger
    reason = CONSTRAINT_MISMATCH if of_constraints else SAMPLER_MISMATCH

    def refused(rollout: RolloutPlan) -> RolloutPlan:
        return rollout.drop(reason, rollout.trained_tokens) if rollout.trained_tokens else rollout

    return group.model_copy(update={"rollouts": [refused(rollout) for rollout in group.rollouts]})
