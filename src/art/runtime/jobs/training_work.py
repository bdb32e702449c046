"""How training jobs are done: the trainer makes the next checkpoint, and the engine proves and serves it.

When a job ends, the record of its step says what became of each rollout. A record that cannot be written never fails a
step; the step then has a finding that says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from art.config import TrainConfig, TrainSFTConfig
from art.config.losses import MASKED_ALARM
from art.credit.ledger import CONSTRAINT_MISMATCH, SAMPLER_MISMATCH, close_ledger, close_unused_ledger
from art.credit.plan import StepPlan
from art.credit.samples import build_samples
from art.credit.sft import sft_samples
from art.errors import (
    ConstraintMismatchError,
    CorruptCheckpointError,
    NothingTrainableError,
    StorageError,
    TrainingError,
)
from art.gateway.record.recorder import Recorder
from art.gateway.record.usage_book import Amounts
from art.metrics.findings import RUN_STEPS, Finding, find_findings, measure_trends
from art.protocol.calls import Train, TrainSft
from art.protocol.samples import TrainingSample
from art.runtime.jobs.job import Done, Entry, Job, JobControl, SftPayload, TrainPayload
from art.runtime.jobs.store import JobStore
from art.runtime.models import Models
from art.runtime.registry import RegisteredModel
from art.storage import checkpoints
from art.storage.layout import ModelPaths
from art.storage.steps.plan_record import GroupPlan, PlanRecord, write_plan
from art.storage.steps.token_file import TokenFile, remove_old_token_files

logger = logging.getLogger(__name__)

_LARGEST_FULL = 1 << 30
"""Largest whole model, in bytes, that the trainer loads beside its own to compare stale rollouts with it."""


class TrainingWork:
    """Runs training jobs: the trainer makes the next checkpoint, and the engine loads it."""

    def __init__(self, models: Models, recorder: Recorder, store: JobStore) -> None:
        self._models = models
        self._recorder = recorder
        self._store = store

    def lane(self, job: Entry) -> str:
        return training_lane(self._models.find(job.project, job.name)[0].base_model)

    def from_step(self, job: Job) -> int:
        """Return the model's newest step, from which the job trains.

        Raises:
            TrainingError: the model has moved to another step since the job first began.
        """
        model, _ = self._models.find(job.project, job.name)
        if job.from_step is not None and job.from_step != model.step:
            raise TrainingError(
                f"job {job.job_id} began at step {job.from_step} of {model.key}, which is at step {model.step} now. "
                "Submit its groups again under a new id"
            )
        return model.step

    async def run(self, job: Job, from_step: int | None, control: JobControl) -> Done:
        assert from_step is not None
        assert isinstance(job.payload, TrainPayload | SftPayload)
        done = await self._train(job, job.payload, from_step, control)
        folder = self._models.data_dir.model(job.project, job.name).step(done.changes["step"])
        findings = await asyncio.to_thread(record_plan, folder, job, job.payload.plan, done, from_step=from_step)
        return replace(done, changes={**done.changes, "findings": [*done.changes["findings"], *findings]})

    async def _train(self, job: Job, payload: TrainPayload | SftPayload, from_step: int, control: JobControl) -> Done:
        started = time.perf_counter()
        model, host = self._models.find(job.project, job.name)
        paths, step = self._models.data_dir.model(job.project, job.name), from_step + 1
        source, target = paths.checkpoint(from_step), paths.checkpoint(step)
        plan = payload.plan
        if isinstance(payload, TrainPayload) and payload.is_empty:
            return _untrained(job, from_step, source)
        if not host.engine_process.has_failed:
            host.engine_process.start()  # publishing needs it: after a restart both processes start at the same time
        await asyncio.to_thread(self._models.published, model, from_step)
        await asyncio.to_thread(_remove_unpublished, target, job.job_id)
        call = await asyncio.to_thread(self._build_call, payload, paths, from_step, job.job_id, host.engine_dtype)
        keep = model.settings.trainer.keep_token_files
        call = replace(call, record_to=None if keep == 0 else paths.step(step))
        if isinstance(call, Train):
            call = replace(call, probe_gap=host.adapters.probe_gap)
        trained_s = host.trainer.training_s
        try:
            result = await host.trainer.train(
                call, stop=control.stop, on_progress=lambda done, total: control.progress("train", done, total)
            )
        except NothingTrainableError as error:
            if job.kind != "train":
                raise
            return _untrained(job, from_step, source, refused=error)
        except TrainingError as error:
            if payload.repeated is None:
                raise
            raise TrainingError(f"{payload.repeated}. This time it failed: {error}") from error
        finally:
            await self._note_time(job, (host.trainer.training_s - trained_s) * host.num_trainer_devices)
        if control.stop.is_set():  # the call ended before it could be stopped; its checkpoint was not published
            await asyncio.to_thread(checkpoints.delete, target)
        control.check()
        await control.progress("publish", 0, 1)
        ledger = close_ledger(plan.ledger, result.metrics) if plan.ledger else {}
        identity = await asyncio.to_thread(checkpoints.identify, target)
        await host.prove_layers(model.settings.lora)  # was done at registration, unless the server was started again
        published = await host.adapters.load(model.adapter_id(step), target)
        metrics = result.metrics | plan.metrics | ledger | published
        metrics["time/step_job_s"] = time.perf_counter() - started
        metrics |= host.end_of_step()
        earlier = await self._store.step_metrics(job.project, job.name, from_step, RUN_STEPS - 1)
        metrics |= measure_trends(metrics, earlier)
        measured = await asyncio.to_thread(_find_findings, metrics, source, payload.config)
        metrics |= {f"findings/{finding.name}": 1.0 for finding in measured}
        findings = [
            *plan.findings,
            *result.findings,
            *([payload.repeated] if payload.repeated else ()),
            *map(str, measured),
        ]
        for text in findings:
            logger.info("%s step %d: %s", model.key, step, text)
        changes = {"trained": True, "metrics": metrics, "findings": findings, "checkpoint_path": str(target)}
        await self._remove_old_moments(model, step)
        await self._remove_old_token_files(model, step)
        return Done(
            changes | {"step": step}, published_step=step, identity=identity, learnt_from=plan.exchange_ids,
            used=self._recorder.usage.count(job.project, job.name, Amounts(steps=1), key_id=job.key_id),
        )  # fmt: skip

    async def _note_time(self, job: Job, device_s: float) -> None:
        """Store the seconds of devices that a step has used. If that fails, training goes on, and they are stored with
        the next usage."""
        usage = self._recorder.usage
        usage.add(job.project, job.name, Amounts(training_s=device_s), key_id=job.key_id)
        try:
            await usage.flush()
        except StorageError as error:
            logger.warning("cannot store yet what a step of %s has used: %s", job.model_key, error)

    async def _remove_old_moments(self, model: RegisteredModel, step: int) -> None:
        """Delete optimiser moments that the model's settings do not keep. Training goes on if that fails."""
        keep = model.settings.trainer.keep_moments
        if keep is None:
            return
        needed = set(map(Path, await self._store.needed_checkpoints()))
        directory = self._models.paths(model).checkpoints
        try:
            await asyncio.to_thread(checkpoints.remove_old_moments, directory, newest=step, keep=keep, needed=needed)
        except StorageError as error:
            logger.warning("cannot remove old optimiser moments: %s", error)

    async def _remove_old_token_files(self, model: RegisteredModel, step: int) -> None:
        """Delete token files that the model's settings do not keep. Training goes on if that fails."""
        keep = model.settings.trainer.keep_token_files
        if keep is None:
            return
        steps = self._models.paths(model).steps
        try:
            await asyncio.to_thread(remove_old_token_files, steps, newest=step, keep=keep)
        except StorageError as error:
            logger.warning("cannot remove old token files: %s", error)

    def _build_call(
        self, payload: TrainPayload | SftPayload, paths: ModelPaths, from_step: int, job_id: str, engine_dtype: str
    ) -> Train | TrainSft:
        source, target = paths.checkpoint(from_step), paths.checkpoint(from_step + 1)
        if isinstance(payload, SftPayload):
            return TrainSft(
                samples=sft_samples(payload.paths),
                config=payload.config,
                from_checkpoint=source,
                to_checkpoint=target,
                job_id=job_id,
            )
        recorded = build_samples([*payload.plan.samples, *payload.plan.observations], self._recorder)
        references = _samplers(recorded, paths, from_step) | payload.references
        return Train(
            samples=[*recorded, *sft_samples(payload.sft, payload.config.sft_weight)],
            config=payload.config,
            from_checkpoint=source,
            to_checkpoint=target,
            job_id=job_id,
            pairs=payload.plan.pairs,
            references=references,
            engine_dtype=engine_dtype,
        )


def _samplers(samples: Sequence[TrainingSample], paths: ModelPaths, from_step: int) -> dict[int, Path]:
    """Find the checkpoints that sampled stale tokens of a step that starts from `from_step`; by step.

    One that has been deleted is left out, and so are large models of full fine-tuning, which would take memory and time
    like the step itself: their rollouts are trained without being compared with them.
    """
    rl = [sample for sample in samples if sample.component == "rl"]
    versions = {sample.policy_version for sample in rl} | {step for sample in rl for _, step in sample.versions}
    stale = {version: paths.checkpoint(version) for version in sorted(versions) if version < from_step}
    return {version: path for version, path in stale.items() if path.exists() and _is_small(path)}


def _is_small(checkpoint: Path) -> bool:
    weights = checkpoint / checkpoints.MODEL_WEIGHTS
    return not checkpoints.is_full(checkpoint) or weights.stat().st_size <= _LARGEST_FULL


def _untrained(job: Job, step: int, checkpoint: Path, *, refused: NothingTrainableError | None = None) -> Done:
    """End a job that has nothing to learn: the model stays at `step`.

    Args:
        refused: why the trainer took none of the planned samples.
    """
    assert isinstance(job.payload, TrainPayload)
    plan = job.payload.plan
    metrics, ledger, findings = plan.metrics, plan.ledger, plan.findings
    if refused is not None:
        metrics = metrics | {"data/step_num_groups_trainable": 0.0}
        of_constraints = isinstance(refused, ConstraintMismatchError)
        ledger = close_unused_ledger(ledger, CONSTRAINT_MISMATCH if of_constraints else SAMPLER_MISMATCH)
        findings = [str(refused), *findings]
    logger.info("%s stays at step %d: %s", job.model_key, step, findings[0])
    changes = {
        "step": step, "trained": False, "metrics": metrics | ledger, "findings": findings,
        "checkpoint_path": str(checkpoint),
    }  # fmt: skip
    return Done(changes)


def training_lane(base_model: str) -> str:
    """Name the lane of the jobs that can change the step of a model of `base_model`. They run one at a time."""
    return f"training of {base_model}"


def _find_findings(metrics: dict[str, float], source: Path, config: TrainConfig | TrainSFTConfig) -> list[Finding]:
    """Compare a step with the rules of `find_findings`. The job's own settings replace the bound of one of them."""
    gate = None if isinstance(config, TrainSFTConfig) else config.mismatch
    highs = {} if gate is None else {"offpolicy/mismatch_masked_share": MASKED_ALARM}
    return find_findings(metrics, checkpoints.read_state(source).metrics, highs=highs)


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
        groups=[_drop(group, dropped or {}) for group in plan.groups] if trained else _all_dropped(plan.groups, ledger),
    )
    try:
        write_plan(folder, record)
    except StorageError as error:
        logger.warning("the plan of step %d of %s is not recorded: %s", record.step, job.model_key, error)
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


def _all_dropped(groups: Sequence[GroupPlan], ledger: Mapping[str, float]) -> list[GroupPlan]:
    """Return the groups of a job that trained nothing. What was planned to be trained, the trainer has refused."""
    of_constraints = f"ledger/dropped_tokens/{CONSTRAINT_MISMATCH}" in ledger
    reason = CONSTRAINT_MISMATCH if of_constraints else SAMPLER_MISMATCH
    planned = {rollout.label: rollout.trained_tokens for group in groups for rollout in group.rollouts}
    return [_drop(group, {label: {reason: count} for label, count in planned.items() if count}) for group in groups]
