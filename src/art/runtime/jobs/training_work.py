"""The work of `train` and `train_sft`.

    trainer makes checkpoint n+1 from n --> engine publishes and proves it --> recorded: the model is at n+1

A request with nothing to learn is a job as well: it succeeds without a checkpoint, so that a client that asks again
gets the same answer. The trainer recognises a checkpoint that a job has already written and gives its recorded result,
so nothing is trained twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from art.credit.plan import close_ledger, close_unused_ledger
from art.errors import CorruptCheckpointError, NothingTrainableError, TrainingError
from art.metrics.findings import find_findings
from art.metrics.trends import WINDOW, measure_trends
from art.protocol.calls import TRAINER_CALLS, Train, TrainSft, decode_call
from art.runtime.host import BaseModelHost
from art.runtime.jobs.runner import Done, JobControl
from art.runtime.jobs.store import Entry, Job
from art.runtime.registry import RegisteredModel
from art.storage import checkpoints
from art.storage.layout import DataDir

logger = logging.getLogger(__name__)


class TrainingWork:
    """`on_published` is told of each new step; `earlier_metrics` is `JobStore.step_metrics`."""

    def __init__(
        self,
        data_dir: DataDir,
        find: Callable[[str, str], tuple[RegisteredModel, BaseModelHost]],
        on_published: Callable[[RegisteredModel, int], None],
        earlier_metrics: Callable[[str, str, int, int], Awaitable[list[dict[str, float]]]],
    ) -> None:
        self._data_dir = data_dir
        self._find = find
        self._on_published = on_published
        self._earlier_metrics = earlier_metrics

    def lane(self, job: Entry) -> str:
        return training_lane(self._find(job.project, job.name)[0].base_model)

    def from_step(self, job: Job) -> int:
        """
        Raises:
            TrainingError: the job began at another step than the model is at now.
        """
        model, _ = self._find(job.project, job.name)
        if job.from_step is not None and job.from_step != model.step:
            raise TrainingError(
                f"job {job.job_id} began at step {job.from_step} of {model.key}, which is at step {model.step} now. "
                "Submit its groups again under a new id"
            )
        return model.step

    async def run(self, job: Job, from_step: int | None, control: JobControl) -> Done:
        started = time.perf_counter()
        assert from_step is not None
        model, host = self._find(job.project, job.name)
        paths, step = self._data_dir.model(job.project, job.name), from_step + 1
        source, target = paths.checkpoint(from_step), paths.checkpoint(step)
        call = job.payload["call"]
        if not call["samples"]:
            return _untrained(job, from_step, source)
        await asyncio.to_thread(_make_way, target, job.job_id)
        try:
            result = await host.trainer.train(
                _training_call(job.kind, call, source, target, job.job_id),
                stop=control.stop,
                on_progress=lambda done, total: control.progress("train", done, total),
            )
        except NothingTrainableError as error:
            if job.kind != "train":
                raise
            return _untrained(job, from_step, source, refused=str(error))
        except TrainingError as error:
            if (repeated := job.payload.get("repeated")) is None:
                raise
            raise TrainingError(f"{repeated}. This time it failed: {error}") from error
        if control.stop.is_set():  # it had ended before it could be stopped, and nobody has seen it
            await asyncio.to_thread(checkpoints.delete, target)
        control.check()
        await control.progress("publish", 0, 1)
        ledger = job.payload["ledger"]
        accounts = close_ledger(ledger, result.metrics) if ledger is not None else {}
        published = await host.adapters.load(model.adapter_id(step), target)
        metrics = result.metrics | job.payload["metrics"] | accounts | published
        metrics["time/step_job_s"] = time.perf_counter() - started
        before = (await asyncio.to_thread(checkpoints.read_state, source)).metrics
        metrics |= measure_trends(metrics, await self._earlier_metrics(job.project, job.name, from_step, WINDOW - 1))
        found = find_findings(metrics, before, highs=_own_bounds(job))
        metrics |= {f"findings/{finding.rule.name}": 1.0 for finding in found}
        repeated = job.payload.get("repeated")
        findings = [*job.payload["findings"], *([repeated] if repeated else ()), *map(str, found)]
        for text in findings:
            logger.info("%s step %d: %s", model.key, step, text)
        changes = {
            "step": step, "trained": True, "metrics": metrics, "findings": findings, "checkpoint_path": str(target),
        }  # fmt: skip
        return Done(changes, published_step=step, learnt_from=job.payload.get("exchange_ids", ()))

    async def recorded(self, job: Job, done: Done) -> None:
        if done.published_step is not None:
            self._on_published(self._find(job.project, job.name)[0], done.published_step)


def _untrained(job: Job, step: int, checkpoint: Path, *, refused: str | None = None) -> Done:
    """The end of a job without anything to learn: the model stays at `step`.

    Args:
        refused: why the trainer took none of the samples that were planned. It learns from every sample that the gate
            lets pass.
    """
    metrics, ledger, findings = job.payload["metrics"], job.payload["ledger"], job.payload["findings"]
    if refused is not None:
        metrics = metrics | {"data/step_num_groups_trainable": 0.0}
        ledger = close_unused_ledger(ledger, "sampler_mismatch")
        findings = [refused, *findings]
    logger.info("%s/%s stays at step %d: %s", job.project, job.name, step, findings[0])
    changes = {
        "step": step, "trained": False, "metrics": metrics | ledger, "findings": findings,
        "checkpoint_path": str(checkpoint),
    }  # fmt: skip
    return Done(changes)


def _training_call(kind: str, call: dict[str, Any], source: Path, target: Path, job_id: str) -> Train | TrainSft:
    """Build the trainer's call from the stored part of a job.

    Raises:
        ConfigError, InvalidRequestError: the stored part is not valid.
    """
    places = {"from_checkpoint": source, "to_checkpoint": target, "job_id": job_id}
    training = decode_call(TRAINER_CALLS, kind, call | places)
    assert isinstance(training, Train | TrainSft)
    return training


def training_lane(base_model: str) -> str:
    """Of all jobs that change the step of a model of `base_model`."""
    return f"training of {base_model}"


def _own_bounds(job: Job) -> dict[str, float]:
    """Upper bounds of metrics that the job's own settings put in place of those of the rules."""
    gate = job.payload["call"]["config"].get("mismatch")
    return {} if gate is None else {"offpolicy/mismatch_masked_share": gate["alarm"]}


def _make_way(target: Path, job_id: str) -> None:
    """Remove a checkpoint that another job wrote but never published (its publish failed)."""
    if not target.exists():
        return
    try:
        if checkpoints.read_state(target).job_id == job_id:
            return
    except CorruptCheckpointError:
        logger.warning("%s is incomplete", target)
    logger.warning("removing %s: it was never published", target)
    checkpoints.delete(target)
