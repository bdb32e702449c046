"""The checkpoints of a model on the server: list and delete them, read their files, and queue jobs on them. And what
scripts log for their models.

Some checkpoints are never deleted, whatever a request says: the newest, the best by a metric, the promoted one, and
those in use. A checkpoint is in use while requests sample from it or an unfinished job needs it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from art.errors import NotFoundError
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
from art.protocol.training import DeleteCheckpointsRequest, JobKind, JobStatus
from art.runtime.hosting.host import BaseModelHost
from art.runtime.jobs.file_jobs import plan_export, plan_fork, plan_pull, plan_push
from art.runtime.jobs.job import Payload, make_fingerprint
from art.runtime.jobs.queue import JobQueue
from art.runtime.models import Models
from art.runtime.registry import RegisteredModel
from art.storage import checkpoints
from art.storage.jsonl import append_lines, missing_rows
from art.storage.layout import ModelPaths, validate_name
from art.worker.waits import acquired

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
