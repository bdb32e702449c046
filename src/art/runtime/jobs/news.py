"""What jobs tell the live view: that they began, how far they are, how they ended, and what a step has measured."""

from __future__ import annotations

from collections.abc import Iterator

from art.protocol.job_states import JobState
from art.protocol.live.events import FindingMade, JobMoved, LiveData, StepEnded
from art.protocol.training import JobProgress, JobStatus, WireError
from art.runtime.jobs.job import Entry

SHOWN_METRICS = (
    "data/reward_mean", "loss/entropy", "loss/kl_to_sampler", "loss/grad_norm", "data/step_num_rollouts_trained",
    "ledger/sampled_tokens", "ledger/trained_tokens", "throughput/train_tokens_per_s", "time/step_trainer_s",
    "time/publish_s", "time/step_job_s",
)  # fmt: skip
"""Metrics of a step that the live view shows."""


def moved(
    entry: Entry, state: JobState, *, progress: JobProgress | None = None, error: WireError | None = None
) -> JobMoved:
    """Tell that a job changed its state or made progress."""
    done = {} if progress is None else {"phase": progress.phase, "done": progress.done, "total": progress.total}
    return JobMoved(
        job_id=entry.job_id, job_kind=entry.kind, project=entry.project, name=entry.name, state=state,
        error=None if error is None else error.message.partition("\n")[0], **done,
    )  # fmt: skip


def news_of_end(status: JobStatus) -> Iterator[LiveData]:
    """Tell what a training job that succeeded has measured and found."""
    if status.kind not in ("train", "train_sft") or status.step is None:
        return
    shown = {name: status.metrics[name] for name in SHOWN_METRICS if name in status.metrics}
    yield StepEnded(
        project=status.project, name=status.name, step=status.step, trained=bool(status.trained), metrics=shown
    )
    for text in status.findings:
        yield FindingMade(project=status.project, name=status.name, step=status.step, text=text)
