"""The plan record that a training job leaves: what the trainer dropped, what was never trained, and a disk that is full."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art.config import TrainConfig
from art.credit.plan import StepPlan
from art.runtime.jobs.job import Job, TrainPayload
from art.runtime.jobs.runner import record_plan
from art.storage import atomic
from art.storage.step_files import (
    GroupPlan,
    RecordedSample,
    RolloutPlan,
    StepTokens,
    TokenReason,
    read_plans,
    write_token_file,
)

LABELS = [f"groups[0].trajectories[{index}]" for index in range(3)]
PLAN = StepPlan(
    groups=[
        GroupPlan(
            index=0,
            rollouts=[
                RolloutPlan(index=0, label=LABELS[0], trained_tokens=4),
                RolloutPlan(index=1, label=LABELS[1], trained_tokens=2),
                RolloutPlan(index=2, label=LABELS[2], dropped_tokens={"truncated": 3}),
            ],
        )
    ]
)
JOB = Job(
    job_id="job-00000001",
    kind="train",
    project="p",
    name="m",
    lane="",
    payload=TrainPayload(config=TrainConfig(), plan=PLAN),
)


def done(*, trained: bool = True, **ledger: float) -> dict[str, Any]:
    metrics = {"loss/train": 0.1} | {f"ledger/{name}": value for name, value in ledger.items()}
    return {"step": 4 if trained else 3, "trained": trained, "metrics": metrics, "findings": []}


def write_tokens(folder: Path, job_id: str = JOB.job_id) -> None:
    """The gate left out one token of the first rollout and all of the second."""
    common: dict[str, Any] = {
        "group_id": None, "component": "rl", "shared": 0, "weight": 1.0, "scale": 1.0, "temperature": 1.0,
        "policy_version": 3, "update": 0, "micro_batch": 0,
    }  # fmt: skip
    samples = [
        RecordedSample(sample_id="a", rollout_id=LABELS[0], num_inputs=5, spans=[[1, 5]], **common),
        RecordedSample(sample_id="b", rollout_id=LABELS[1], num_inputs=3, spans=[[1, 3]], **common),
    ]
    reasons = [TokenReason.TRAINED, TokenReason.CLIPPED, TokenReason.MISMATCHED_TOKEN, TokenReason.TRAINED]
    reasons += [TokenReason.MISMATCHED_ROLLOUT] * 2
    columns: dict[str, Any] = {
        name: np.zeros(6, dtype=np.float16) for name in ("policy_logprobs", "log_ratios", "entropy")
    }
    columns["reasons"] = np.asarray(reasons, dtype=np.uint8)
    write_token_file(folder, StepTokens(job_id=job_id, from_step=3, samples=samples, columns=columns))


def outcomes(folder: Path) -> list[tuple[int, dict[str, int]]]:
    (plan,) = read_plans(folder)
    return [(rollout.trained_tokens, rollout.dropped_tokens) for rollout in plan.groups[0].rollouts]


def test_what_the_trainer_left_out_is_counted_by_rollout(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    assert record_plan(tmp_path, JOB, done(trained_tokens=3.0), from_step=3) == []
    assert outcomes(tmp_path) == [(3, {"sampler_mismatch": 1}), (0, {"sampler_mismatch": 2}), (0, {"truncated": 3})]
    (plan,) = read_plans(tmp_path)
    assert (plan.has_token_file, plan.from_step, plan.step, plan.kind) == (True, 3, 4, "train")
    assert plan.ledger == {"ledger/trained_tokens": 3.0}


@pytest.mark.parametrize("job_id", [None, "job-99999999"])
def test_without_its_own_token_file_the_plan_stands(tmp_path: Path, job_id: str | None) -> None:
    if job_id is not None:
        write_tokens(tmp_path, job_id)
    record_plan(tmp_path, JOB, done(), from_step=3)
    assert outcomes(tmp_path) == [(4, {}), (2, {}), (0, {"truncated": 3})]
    assert not read_plans(tmp_path)[0].has_token_file


@pytest.mark.parametrize("reason", ["sampler_mismatch", "constraint_mismatch"])
def test_a_step_that_the_trainer_refused_trained_nothing(tmp_path: Path, reason: str) -> None:
    record_plan(tmp_path, JOB, done(trained=False, **{f"dropped_tokens/{reason}": 6.0}), from_step=3)
    assert outcomes(tmp_path) == [(0, {reason: 4}), (0, {reason: 2}), (0, {"truncated": 3})]
    (plan,) = read_plans(tmp_path)
    assert (plan.trained, plan.step) == (False, 3)


def test_a_job_that_runs_again_leaves_one_record(tmp_path: Path) -> None:
    for _ in range(2):
        record_plan(tmp_path, JOB, done(), from_step=3)
    assert len(read_plans(tmp_path)) == 1


def test_a_full_disk_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic, "sync", full)
    (finding,) = record_plan(tmp_path, JOB, done(), from_step=3)
    assert "the record of which rollouts the step was given could not be written: the disk is full" in finding
    assert list(tmp_path.iterdir()) == []
