"""The checkpoints of a model on the server: list, delete and promote them, read their files, and queue jobs on them.
And what scripts log for their models.

Some checkpoints are never deleted, whatever a request says: the newest, the best by a metric, the promoted one, and
those in use. A checkpoint is in use while requests sample from it or an unfinished job needs it.

A promotion judges the gate on held-out scores, lets the engine load the checkpoint, and records the decision. Until a
checkpoint is loaded and recorded, and if either fails, `project/name@promoted` goes on to mean the one before. The
history in SQLite has every decision about a model's promoted checkpoint, refusals included.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import math
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.errors import ConfigError, ConflictError, NotFoundError, PromotionError
from art.metrics.scores import MIN_SCENARIOS, Values, measure_improvement, tail_of_look
from art.protocol.checkpoint_calls import (
    CheckpointInfo,
    CheckpointJobRequest,
    ExportRequest,
    FileInfo,
    FileList,
    ForkRequest,
    LogRequest,
    MetricsRow,
    PullRequest,
    PushRequest,
)
from art.protocol.promotions import (
    Decision,
    Gate,
    PromoteRequest,
    Promotion,
    PromotionHistory,
    PromotionRecord,
    Verdict,
)
from art.protocol.training import DeleteCheckpointsRequest, JobKind, JobStatus
from art.runtime.hosting.host import BaseModelHost
from art.runtime.jobs.file_jobs import plan_export, plan_fork, plan_pull, plan_push
from art.runtime.jobs.job import Payload, make_fingerprint
from art.runtime.jobs.queue import JobQueue
from art.runtime.models import Models
from art.runtime.registry import RegisteredModel
from art.storage import checkpoints
from art.storage.database import uninterrupted
from art.storage.jsonl import append_lines, missing_rows, read_lines
from art.storage.layout import ModelPaths, validate_name
from art.worker.waits import acquired

logger = logging.getLogger(__name__)

_writing = threading.Lock()
"""Keeps two copies of one request from both finding that the row is new."""


def append_once(
    paths: ModelPaths, split: str, step: int, row: Mapping[str, Any], groups: Sequence[dict[str, Any]]
) -> None:
    """Append a row to the history and groups to the file of their split and step, unless they are there.

    A script on another machine sends each row of its history with the groups that it logged, in parts, and sends a part
    again if it got no answer. A row has the time at which it was written, so the same row is the same call. If it is
    there, only groups are missing: of a later part, after a crash in between, or none if the script wrote here itself.

    Raises:
        InvalidRequestError: `split` is not a valid name.
        DiskFullError, StorageError: writing failed. Sending the same again completes it.
    """
    path = paths.trajectories(split, step)
    with _writing:
        if new := missing_rows(paths.history, [dict(row)]):
            append_lines(paths.history, new)
        else:
            groups = missing_rows(path, groups)
        if groups:
            append_lines(path, groups)


CHANGE_TIMEOUT_S = 600.0
"""Longest wait of a promotion or deletion for another one of the same model."""
_JOBS: dict[type[CheckpointJobRequest], tuple[JobKind, Callable[[Models, str, str, Any], Payload]]] = {
    ForkRequest: ("fork", plan_fork),
    PullRequest: ("pull", plan_pull),
    ExportRequest: ("export", plan_export),
    PushRequest: ("push", plan_push),
}


class ModelCheckpoints:
    """Lists, deletes and serves checkpoints of models, named by `project` and `name`, and queues jobs on them."""

    def __init__(self, models: Models, jobs: JobQueue) -> None:
        self._models = models
        self._jobs = jobs
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One per model. Promotions and deletions hold it, so that no checkpoint is deleted while it is promoted."""

    async def list_all(self, project: str, name: str, best_metric: str) -> list[CheckpointInfo]:
        """List the published checkpoints of a model, in the order of steps. The one with the highest mean of
        `best_metric`, a logged metric, is marked as the best."""
        model, host = self._models.find(project, name)
        logged = await self._models.registry.mean_metrics(project, name)
        paths = self._models.paths(model)
        steps = await asyncio.to_thread(checkpoints.list_steps, paths.checkpoints)
        steps = [step for step in steps if step <= model.step]
        scores = {step: logged[step][best_metric] for step in steps if best_metric in logged.get(step, {})}
        best = max(scores, key=lambda step: (scores[step], step), default=None)
        needed = await self._in_use(model, host)

        def describe(step: int) -> CheckpointInfo:
            path = paths.checkpoint(step)
            return CheckpointInfo(
                step=step,
                created_at=checkpoints.created_at(path),
                size_bytes=sum(entry.size for entry in checkpoints.list_files(path).values()),
                full=checkpoints.is_full(path),
                metrics=checkpoints.read_state(path).metrics | logged.get(step, {}),
                newest=step == model.step,
                best=step == best,
                in_use=needed.get(step, []),
                promoted=step == model.promoted_step,
            )

        return await asyncio.to_thread(lambda: list(map(describe, steps)))

    def changing(self, model: RegisteredModel) -> AbstractAsyncContextManager[None]:
        """Make a context manager in which nobody else promotes or deletes checkpoints of the model. Raises
        `ProcessError` if another promotion or deletion takes too long."""
        return acquired(self._locks[model.key], f"changes of the checkpoints of {model.key}", CHANGE_TIMEOUT_S)

    async def delete(self, project: str, name: str, request: DeleteCheckpointsRequest) -> list[int]:
        """Delete checkpoints of a model and return their steps.

        The checkpoints that the request names stay, and the newest, the best, the promoted and those in use.
        """
        model, host = self._models.find(project, name)
        async with self.changing(model):
            infos = await self.list_all(project, name, request.best_metric)
            keep = {*request.keep_steps, *[info.step for info in infos][-request.keep_recent :]}
            deleted = []
            for info in infos:
                if info.step in keep or info.newest or info.best or info.promoted or info.in_use:
                    continue
                await host.adapters.forget(model.adapter_id(info.step))
                await asyncio.to_thread(checkpoints.delete, self._models.checkpoint(model, info.step))
                deleted.append(info.step)
        return deleted

    async def files(self, project: str, name: str, step: int, form: str | None = None) -> FileList:
        """List the files of a checkpoint, or of its export in the format `form`. Raises `NotFoundError` if there is no
        such checkpoint or export."""
        path = self._models.folder(project, name, step, form)
        entries = await asyncio.to_thread(checkpoints.list_files, path)
        files = [FileInfo(name=name, size=entry.size, sha256=entry.sha256) for name, entry in entries.items()]
        manifest = path / checkpoints.MANIFEST
        own = FileInfo(name=manifest.name, size=manifest.stat().st_size, sha256=checkpoints.identify(path))
        return FileList(step=step, files=[*files, own])

    async def file(
        self, project: str, name: str, step: int, file: str, form: str | None = None
    ) -> tuple[Path, FileInfo]:
        """Return the path, size and hash of one file of a checkpoint or export. Raises `NotFoundError` if there is no
        such checkpoint or export, or its manifest does not list the file."""
        for info in (await self.files(project, name, step, form)).files:
            if info.name == file:
                return self._models.folder(project, name, step, form) / file, info
        raise NotFoundError(f"step {step} of {project}/{name} has no file {file!r}", param="file")

    async def log_metrics(self, project: str, name: str, row: MetricsRow) -> None:
        self._models.find(project, name)
        await self._models.registry.add_metrics(project, name, row)

    async def append_log(self, project: str, name: str, request: LogRequest) -> None:
        """Write what a script has logged into the data directory (`append_once`)."""
        paths = self._models.paths(self._models.find(project, name)[0])
        await asyncio.to_thread(append_once, paths, request.split, request.step, request.row, request.groups)

    async def submit(self, project: str, name: str, request: CheckpointJobRequest) -> JobStatus:
        """Queue a job on checkpoints of a model, named by the type of its request. Raises `NotFoundError` if there is
        no such model, step or export and `ConflictError` if a fork has the same source and target, or the job id
        belongs to another request."""
        kind, plan = _JOBS[type(request)]
        validate_name(project, param="project")
        validate_name(name, param="name")
        fingerprint = await asyncio.to_thread(make_fingerprint, f"{kind} {project}/{name}", request)
        if (known := await self._jobs.known(request.job_id, fingerprint)) is not None:
            return known
        payload = await asyncio.to_thread(plan, self._models, project, name, request)
        return await self._jobs.submit(request.job_id, kind, (project, name), payload, fingerprint)

    async def _in_use(self, model: RegisteredModel, host: BaseModelHost) -> dict[int, list[str]]:
        """Describe what needs each step."""
        needed: dict[int, list[str]] = defaultdict(list)
        for adapter, count in host.engine.in_use.items():
            key, _, step = (adapter or "").rpartition("@")
            if count > 0 and key == model.key:
                needed[int(step)].append(f"{count} requests")
        directory = self._models.paths(model).checkpoints
        for path in map(Path, await self._jobs.store.needed_checkpoints()):
            if path.parent == directory:
                needed[int(path.name)].append("a job")
        return needed


# -- promotions --


@dataclass(frozen=True, slots=True)
class GateEvidence:
    """Scores of two checkpoints on held-out scenarios."""

    source: str
    reference_step: int
    reference: Values
    candidate: Values
    num_choices: int = 1
    """Number of measured checkpoints that the candidate may have been chosen from by these scores."""

    @property
    def digest(self) -> str:
        content = [self.reference_step, sorted(self.reference.items()), sorted(self.candidate.items())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def logged_scores(path: Path, metric: str) -> dict[str, list[float]]:
    """Read the values of the rollouts in one file of a log, by scenario.

    A scenario is `scenario_id` in the metadata of a rollout or its group, else the prompt. Rollouts that failed through
    no fault of the policy (`infra_fault`) and rollouts without the metric are left out. `metric` is `reward`, or the
    name of a metric of rollouts.
    """

    def is_prompt(message: dict[str, Any]) -> bool:
        return message.get("role") in ("system", "developer", "user")

    values: dict[str, list[float]] = {}
    for _, group in read_lines(path):
        group = group or {}
        for rollout in group.get("trajectories", ()):
            metadata = rollout.get("metadata") or {}
            value = rollout.get("reward") if metric == "reward" else (rollout.get("metrics") or {}).get(metric)
            if metadata.get("outcome") == "infra_fault" or not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value):
                continue
            names = [one.get("scenario_id") for one in (metadata, group.get("metadata") or {})]
            name = next((str(name) for name in names if name is not None), None)
            if name is None:
                asked = list(itertools.takewhile(is_prompt, rollout.get("messages_and_choices", ())))
                name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
            values.setdefault(name, []).append(float(value))
    return values


def read_evidence(paths: ModelPaths, gate: Gate, *, step: int, reference_step: int) -> GateEvidence:
    """Take the scores that the caller measured, else those of both checkpoints in the log of the model.

    Raises:
        ConflictError: the measured scores are of another reference than the promoted checkpoint.
        ConfigError: the split of the gate is `train`.
        InvalidRequestError: the split is not a valid name.
        StorageError: the log cannot be read.
    """
    if (measured := gate.measured) is not None:
        if measured.reference_step != reference_step:
            raise ConflictError(
                f"the scores compare with step {measured.reference_step}, but step {reference_step} is what the "
                "candidate must beat now; measure again"
            )
        reference, candidate = (
            {str(i): values for i, values in enumerate(side)} for side in (measured.reference, measured.candidate)
        )
        return GateEvidence(measured.source, reference_step, reference, candidate)
    if gate.split == "train":
        raise ConfigError(
            "the rollouts of split 'train' were learnt from, so they cannot show that a checkpoint is better; name a "
            "held-out split such as 'val' or 'test'",
            param="split",
        )
    split = validate_name(gate.split, param="split")
    logged = (file.stem for file in paths.trajectories(split, 0).parent.glob("*.jsonl"))
    oldest = reference_step if step > reference_step else -1
    choices = {int(name) for name in logged if name.isdecimal() and int(name) > oldest} - {reference_step} | {step}
    return GateEvidence(
        source=f"{gate.metric} of split {split!r} in the log",
        reference_step=reference_step,
        reference=logged_scores(paths.trajectories(split, reference_step), gate.metric),
        candidate=logged_scores(paths.trajectories(split, step), gate.metric),
        num_choices=len(choices),
    )


def judge(evidence: GateEvidence, require: float, *, step: int, refused: Collection[str], model: str) -> Verdict:
    """Decide whether `evidence` shows that `step` of `model` is better than the reference by more than `require`.

    `refused` has the hashes of evidence that was refused since the last promotion. Each was a look at the reference.
    """
    look = max(evidence.num_choices, 1 + len(set(refused) - {evidence.digest}))
    score = measure_improvement(evidence.reference, evidence.candidate, look=look)
    verdict = Verdict(
        passed=False, reason="", require=require, source=evidence.source, reference_step=evidence.reference_step,
        num_scenarios=0 if score is None else score.num, look=look, confidence=1 - tail_of_look(look),
    )  # fmt: skip
    if score is not None:
        common = evidence.reference.keys() & evidence.candidate.keys()
        verdict.reference, verdict.candidate = (
            statistics.fmean(statistics.fmean(side[name]) for name in common)
            for side in (evidence.reference, evidence.candidate)
        )
        figures = {"difference": score.mean, "low": score.low, "method": score.method}
        verdict = verdict.model_copy(update=figures)
        verdict.passed = has_figures(verdict) and score.low is not None and score.low > require
    verdict.reason = _reason(verdict, evidence, step, model)
    return verdict


def has_figures(verdict: Verdict) -> bool:
    """Whether enough scenarios were compared. What was not compared could not pass by chance, so it is no look."""
    return verdict.low is not None and verdict.num_scenarios >= MIN_SCENARIOS[verdict.method or "tango"]


def _reason(verdict: Verdict, evidence: GateEvidence, step: int, model: str) -> str:
    reference_step, require = evidence.reference_step, verdict.require
    measure = f"`art promote {model}@{step} --require {require:g} --task TASK --held-out"
    if verdict.difference is None or not has_figures(verdict):
        have = f"step {reference_step} has {len(evidence.reference)} and step {step} {len(evidence.candidate)}"
        return (
            f"{evidence.source}: {verdict.num_scenarios} scenarios were measured with both checkpoints ({have}), and "
            f"at least {MIN_SCENARIOS['tango']} are needed, or {MIN_SCENARIOS['t']} unless each has one value of 0 or "
            "1. Log an evaluation of both on the same scenarios, with `scenario_id` in the metadata of each rollout, "
            f"or measure them now: {measure} 200`"
        )
    figures = (
        f"{evidence.source}: step {step} has {verdict.candidate:.3f} and step {reference_step} {verdict.reference:.3f} "
        f"on {verdict.num_scenarios} scenarios, a difference of {verdict.difference:+.3f} that is above "
        f"{verdict.low:+.3f} with {verdict.confidence:.2%} confidence"
        + (f" (look {verdict.look} at this reference)" if verdict.look > 1 else "")
    )
    if verdict.passed:
        return f"{figures}, so it is above the required {require:+g}"
    if verdict.difference <= require:
        return f"{figures}. More than {require:+g} is required, so the promoted checkpoint stays; train on"
    more = "fresh scenarios count as one look" if verdict.look > 1 else "the interval shrinks with their square root"
    return (
        f"{figures}. The interval must lie above {require:+g}, so this may be chance. Measure on more scenarios "
        f"({more}): {measure} {verdict.num_scenarios * 4} --seed N`"
    )


class Promotions:
    """Promotes checkpoints of models, and keeps the history of it."""

    def __init__(self, models: Models, checkpoints: ModelCheckpoints, *, required: float | None = None) -> None:
        """`required` is the bound of a gate that every promotion has to pass; `None` if each caller chooses."""
        self.required = required
        self._models = models
        self._checkpoints = checkpoints

    async def promote(self, project: str, name: str, request: PromoteRequest, key_id: str) -> Promotion:
        """Make a checkpoint the promoted one of its model, if it passes the gate of the request or is forced.

        Nothing is compared and recorded if it is the promoted one already. The history has `key_id`, the key that asks.

        Raises:
            NotFoundError: there is no such model or published checkpoint.
            ConfigError: the model's engine cannot serve a step beside the newest, the split is not held out, or the
                request asks for less than the server requires.
            PromotionError: the checkpoint does not pass the gate. The refusal is recorded.
            ConflictError: measured scores compare with another checkpoint than the promoted one.
            CorruptCheckpointError, AdapterError, HandshakeError: the checkpoint cannot be served.
            ProcessError: the engine cannot start, or another promotion or deletion took too long.
        """
        model, host = self._models.find(project, name)
        step = request.step
        if host.one_policy:
            raise ConfigError(
                f'{model.key} cannot have a promoted checkpoint: with `weights="merged"` vLLM serves one step at a '
                'time, the newest. Register the model with `weights="lora"` or the embedded engine, or fork step '
                f"{step} to a model of another name on a server of its own",
                param="step",
            )
        gate = self._gate(request)
        async with self._checkpoints.changing(model):
            path = await asyncio.to_thread(self._models.folder, project, name, step)
            previous = self._models.find(project, name)[0].promoted_step
            promotion = Promotion(step=step, inference_name=f"{model.key}@promoted", previous_step=previous)
            if step == previous:
                return promotion
            decision: Decision = "forced" if request.force else "ungated"
            evidence = None
            if gate is not None:
                scores = await asyncio.to_thread(
                    read_evidence, self._models.paths(model), gate, step=step, reference_step=previous or 0
                )
                refused = await self._models.registry.refused_evidence(project, name)
                verdict = await asyncio.to_thread(
                    judge, scores, gate.require, step=step, refused=refused, model=model.key
                )
                evidence = scores.digest if has_figures(verdict) else None
                decision = "passed" if verdict.passed else decision if request.force else "refused"
                promotion.verdict = verdict
            record = PromotionRecord(
                number=0, at=time.time(), step=step, previous_step=previous, decision=decision, key_id=key_id,
                note=request.note, verdict=promotion.verdict,
            )  # fmt: skip
            if decision == "refused":
                await self._models.registry.add_decision(project, name, record, evidence)
                assert promotion.verdict is not None
                refusal = f"step {step} of {model.key} is not promoted. {promotion.verdict.reason}"
                raise PromotionError(refusal if self.required is None else f"{refusal}. {self._rule()}")
            await host.adapters.load(model.adapter_id(step), path)

            async def record_promotion() -> None:
                await self._models.registry.add_decision(project, name, record, evidence)
                self._models.set_promoted(model.key, step)  # now requests to the promoted name get its checkpoint

            await uninterrupted(record_promotion())
        logger.info("promoted step %d of %s (%s); before it was %s", step, model.key, decision, previous)
        return promotion

    async def history(self, project: str, name: str) -> PromotionHistory:
        """Return all decisions about the promoted checkpoint of a model. Raises `NotFoundError` if there is no such
        model."""
        self._models.find(project, name)
        return PromotionHistory(promotions=await self._models.registry.decisions(project, name))

    def _gate(self, request: PromoteRequest) -> Gate | None:
        """The gate of the request, or the one that the server requires. Raises `ConfigError` if the request asks for
        less than the server requires."""
        if self.required is None:
            return request.gate
        if request.gate is None:
            return Gate(require=self.required)
        if request.gate.require < self.required:
            raise ConfigError(
                f"`require` is {request.gate.require:g}, which is less than {self.required:g}. {self._rule()}. Ask for "
                f"{self.required:g} or more, or leave `require` out",
                param="require",
            )
        return request.gate

    def _rule(self) -> str:
        return (
            f"This server requires {self.required:+g} of every promotion (`require_gain` in its configuration), "
            "and only a key with scope `admin` may force one"
        )
