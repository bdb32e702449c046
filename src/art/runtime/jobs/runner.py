"""What one training job does (`TrainingWork.run`): train the next checkpoint, prove it in the engine, record the step.

When a job ends, the record of its step says what became of each rollout. A record that cannot be written never fails a
step; the step then has a finding that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from art.credit.ledger import CONSTRAINT_MISMATCH, SAMPLER_MISMATCH, close_ledger, close_unused_ledger
from art.credit.samples import build_samples
from art.credit.sft import sft_samples
from art.errors import (
    ConstraintMismatchError,
    CorruptCheckpointError,
    NothingTrainableError,
    StorageError,
    TrainingError,
)
from art.metrics.findings import find_findings
from art.protocol.calls import Train, TrainSft
from art.protocol.samples import TrainingSample
from art.record.recorder import Recorder
from art.record.usage_book import Amounts
from art.runtime.hosting.host import BaseModelHost
from art.runtime.jobs.job import Done, Entry, Job, JobControl, JobStore, SftPayload, TrainPayload
from art.runtime.models import Models
from art.runtime.registry import RegisteredModel
from art.storage import checkpoints
from art.storage.layout import ModelPaths
from art.storage.step_files import (
    KEPT_TOKEN_FILES,
    GroupPlan,
    PlanRecord,
    TokenFile,
    remove_old_token_files,
    write_plan,
)

logger = logging.getLogger(__name__)

_LARGEST_FULL = 1 << 30
"""Largest whole model, in bytes, that the trainer loads beside its own to compare stale rollouts with it."""


def training_lane(base_model: str) -> str:
    """Name the lane of the jobs that can change the step of a model of `base_model`. They run one at a time."""
    return f"training of {base_model}"


class TrainingWork:
    """Runs the jobs `train` and `train_sft`."""

    def __init__(self, models: Models, recorder: Recorder, store: JobStore) -> None:
        self._models = models
        self._recorder = recorder
        self._store = store

    def lane(self, job: Entry) -> str:
        return training_lane(self._models.find(job.project, job.name)[0].base_model)

    def from_step(self, job: Job) -> int:
        """Return the model's newest step, from which the job trains. Raises `TrainingError` if the model has moved to
        another step since the job first began."""
        model, _ = self._models.find(job.project, job.name)
        if job.from_step is not None and job.from_step != model.step:
            raise TrainingError(
                f"job {job.job_id} began at step {job.from_step} of {model.key}, which is at step {model.step} now. "
                "Submit its groups again under a new id"
            )
        return model.step

    async def run(self, job: Job, from_step: int | None, control: JobControl) -> Done:
        """Train one step, serve it, and record it. Killed at any point, the job runs again from `from_step`."""
        payload, started = job.payload, time.perf_counter()
        assert from_step is not None
        assert isinstance(payload, TrainPayload | SftPayload)
        model, host = self._models.find(job.project, job.name)
        paths, step = self._models.paths(model), from_step + 1
        source, target = paths.checkpoint(from_step), paths.checkpoint(step)
        if isinstance(payload, TrainPayload) and payload.is_empty:
            return await _end_untrained(job, paths, from_step)

        # The step starts from the checkpoint that was published, and from nothing that another job left unpublished.
        host.engine.start()  # publishing needs it: after a restart both processes start at the same time
        await asyncio.to_thread(self._models.published, model, from_step)
        await asyncio.to_thread(_remove_unpublished, target, job.job_id)

        # The trainer learns from the exact tokens that were recorded, and writes the next checkpoint.
        call = await asyncio.to_thread(self._build_call, payload, paths, from_step, job.job_id, host)
        trained_s = host.trainer.training_s
        try:
            result = await host.trainer.train(
                call, stop=control.stop, on_progress=lambda done, total: control.progress("train", done, total)
            )
        except NothingTrainableError as error:
            if job.kind != "train":
                raise
            return await _end_untrained(job, paths, from_step, refused=error)
        finally:
            await self._note_time(job, (host.trainer.training_s - trained_s) * host.num_trainer_devices)
        if control.stop.is_set():  # the call ended before it could be stopped; its checkpoint was not published
            await asyncio.to_thread(checkpoints.delete, target)
        control.check()

        # The engine loads the new weights, and proves that it samples from the policy that was trained.
        await control.progress("publish", 0, 1)
        identity = await asyncio.to_thread(checkpoints.identify, target)
        await host.prove_layers(model.settings.lora)  # was done at registration, unless the server was started again
        published = await host.adapters.load(model.adapter_id(step), target)

        # The ledger accounts for every token. The step is compared with the steps before it.
        plan = payload.plan
        ledger = close_ledger(plan.ledger, result.metrics) if plan.ledger else {}
        metrics = result.metrics | plan.metrics | ledger | published
        metrics["time/step_job_s"] = time.perf_counter() - started
        metrics |= host.end_of_step()
        before = (await asyncio.to_thread(checkpoints.read_state, source)).metrics
        measured = find_findings(metrics, before)
        metrics |= {f"findings/{finding.name}": 1.0 for finding in measured}
        findings = [*plan.findings, *result.findings, *map(str, measured)]
        for text in findings:
            logger.info("%s step %d: %s", model.key, step, text)

        # The files of the step say what became of each rollout. With `Done` the queue records the step itself.
        changes = await _recorded(job, paths, from_step, step=step, trained=True, metrics=metrics, findings=findings)
        await self._remove_old_files(model, step)
        used = self._recorder.usage.count(job.project, job.name, Amounts(steps=1))
        return Done(changes, published_step=step, identity=identity, used=used)

    def _build_call(
        self, payload: TrainPayload | SftPayload, paths: ModelPaths, from_step: int, job_id: str, host: BaseModelHost
    ) -> Train | TrainSft:
        step: dict[str, Any] = {
            "config": payload.config, "job_id": job_id, "record_to": paths.step(from_step + 1),
            "from_checkpoint": paths.checkpoint(from_step), "to_checkpoint": paths.checkpoint(from_step + 1),
        }  # fmt: skip
        if isinstance(payload, SftPayload):
            return TrainSft(samples=sft_samples(payload.paths), **step)
        recorded = build_samples([*payload.plan.samples, *payload.plan.observations], self._recorder)
        return Train(
            samples=[*recorded, *sft_samples(payload.sft, payload.config.sft_weight)],
            pairs=payload.plan.pairs,
            references=stale_references(recorded, paths, from_step) | payload.references,
            engine_dtype=host.engine_dtype,
            probe_gap=host.adapters.probe_gap,
            **step,
        )

    async def _note_time(self, job: Job, device_s: float) -> None:
        """Store the seconds of devices that a step has used. If that fails, training goes on, and they are stored with
        the next usage."""
        usage = self._recorder.usage
        usage.add(job.project, job.name, Amounts(training_s=device_s))
        try:
            await usage.flush()
        except StorageError as error:
            logger.warning("cannot store yet what a step of %s has used: %s", job.model_key, error)

    async def _remove_old_files(self, model: RegisteredModel, step: int) -> None:
        """Delete optimiser moments and token files that the model's settings do not keep. Training goes on if that
        fails."""
        paths, keep = self._models.paths(model), model.settings.trainer.keep_moments
        needed = set(map(Path, await self._store.needed_checkpoints()))

        def remove() -> None:
            if keep is not None:
                checkpoints.remove_old_moments(paths.checkpoints, newest=step, keep=keep, needed=needed)
            remove_old_token_files(paths.steps, newest=step, keep=KEPT_TOKEN_FILES)

        try:
            await asyncio.to_thread(remove)
        except StorageError as error:
            logger.warning("cannot remove files of old steps of %s: %s", model.key, error)


def stale_references(samples: Sequence[TrainingSample], paths: ModelPaths, from_step: int) -> dict[int, Path]:
    """Find the checkpoints that sampled stale tokens of a step that starts from `from_step`; by step.

    One that has been deleted is left out, and so are large models of full fine-tuning, which would take memory and time
    like the step itself: their rollouts are trained without being compared with them.
    """
    rl = [sample for sample in samples if sample.component == "rl"]
    versions = {sample.policy_version for sample in rl} | {step for sample in rl for _, step in sample.versions}
    stale = {version: paths.checkpoint(version) for version in sorted(versions) if version < from_step}

    def is_small(checkpoint: Path) -> bool:
        weights = checkpoint / checkpoints.MODEL_WEIGHTS
        return not checkpoints.is_full(checkpoint) or weights.stat().st_size <= _LARGEST_FULL

    return {version: path for version, path in stale.items() if path.exists() and is_small(path)}


async def _end_untrained(
    job: Job, paths: ModelPaths, step: int, *, refused: NothingTrainableError | None = None
) -> Done:
    """End a job that has nothing to learn, or of which the trainer `refused` all samples: the model stays at `step`."""
    assert isinstance(job.payload, TrainPayload)
    plan = job.payload.plan
    metrics, ledger, findings = plan.metrics, plan.ledger, [*plan.findings]
    if refused is not None:
        metrics = metrics | {"data/step_num_groups_trainable": 0.0}
        of_constraints = isinstance(refused, ConstraintMismatchError)
        ledger = close_unused_ledger(ledger, CONSTRAINT_MISMATCH if of_constraints else SAMPLER_MISMATCH)
        findings.insert(0, str(refused))
    logger.info("%s stays at step %d: %s", job.model_key, step, findings[0])
    return Done(
        await _recorded(job, paths, step, step=step, trained=False, metrics=metrics | ledger, findings=findings)
    )


def _remove_unpublished(target: Path, job_id: str) -> None:
    """Remove a checkpoint that another job wrote but did not publish."""
    if not target.exists():
        return
    try:
        if checkpoints.read_state(target).job_id == job_id:
            return
    except CorruptCheckpointError:
        logger.warning("%s is incomplete", target)
    logger.warning("removing %s: it was never published", target)
    checkpoints.delete(target)


# -- the record of the step --


async def _recorded(
    job: Job,
    paths: ModelPaths,
    from_step: int,
    *,
    step: int,
    trained: bool,
    metrics: dict[str, float],
    findings: list[str],
) -> dict[str, Any]:
    """Write the record of the step at which the model is now. Returns what becomes known about the job."""
    path = str(paths.checkpoint(step))
    changes = {"step": step, "trained": trained, "metrics": metrics, "findings": findings, "checkpoint_path": path}
    problems = await asyncio.to_thread(record_plan, paths.step(step), job, changes, from_step=from_step)
    return {**changes, "findings": [*findings, *problems]}


def record_plan(folder: Path, job: Job, changes: Mapping[str, Any], *, from_step: int) -> list[str]:
    """Write the record of `job` to `folder`, the folder of the step at which the model is now. `changes` has the step,
    the metrics and whether it was trained. Returns findings: why the record could not be written, or nothing."""
    assert isinstance(job.payload, TrainPayload | SftPayload)
    plan, trained = job.payload.plan, changes["trained"]
    ledger = {name: value for name, value in changes["metrics"].items() if name.startswith("ledger/")}
    # Tokens of each rollout that count as trained in the plan and were not, by label and reason.
    dropped: Mapping[str, Mapping[str, int]] | None = None
    if trained:
        with contextlib.suppress(StorageError):  # the trainer wrote no file
            tokens = TokenFile(folder)
            dropped = tokens.count_dropped() if tokens.job_id == job.job_id else None
    else:  # what was planned to be trained, the trainer has refused
        of_constraints = f"ledger/dropped_tokens/{CONSTRAINT_MISMATCH}" in ledger
        reason = CONSTRAINT_MISMATCH if of_constraints else SAMPLER_MISMATCH
        rollouts = [rollout for group in plan.groups for rollout in group.rollouts]
        dropped = {one.label: {reason: one.trained_tokens} for one in rollouts if one.trained_tokens}
    record = PlanRecord(
        job_id=job.job_id,
        kind="train_sft" if job.kind == "train_sft" else "train",
        created_at=time.time(),
        from_step=from_step,
        step=changes["step"],
        trained=trained,
        ledger=ledger,
        has_token_file=trained and dropped is not None,
        groups=[_drop(group, dropped or {}) for group in plan.groups],
    )
    try:
        write_plan(folder, record)
    except StorageError as error:
        logger.warning("the plan of step %d of %s is not recorded: %s", record.step, job.model_key, error)
        return [f"the record of which rollouts the step was given could not be written: {error}"]
    return []


def _drop(group: GroupPlan, dropped: Mapping[str, Mapping[str, int]]) -> GroupPlan:
    """Return the group without the tokens in `dropped` among the trained ones."""
    rollouts = list(group.rollouts)
    for index, rollout in enumerate(rollouts):
        for reason, num_tokens in dropped.get(rollout.label, {}).items():
            rollouts[index] = rollouts[index].drop(reason, num_tokens)
    return group.model_copy(update={"rollouts": rollouts})
