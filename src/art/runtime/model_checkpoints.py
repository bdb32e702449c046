"""The checkpoints of a model on the server: list and delete them, read their files, and queue jobs on them.

Some checkpoints are never deleted, whatever a request says: the newest, the best by a metric, the promoted one, and
those in use. A checkpoint is in use while requests sample from it or an unfinished job needs it.
"""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

from art.errors import NotFoundError
from art.protocol.checkpoint_calls import (
    CheckpointInfo,
    ExportRequest,
    FileInfo,
    FileList,
    ForkRequest,
    MetricsRow,
    PullRequest,
    PushRequest,
)
from art.protocol.job_states import JobKind
from art.protocol.training import DeleteCheckpointsRequest, JobStatus
from art.runtime.host import BaseModelHost
from art.runtime.jobs.file_jobs import plan_export, plan_fork, plan_pull, plan_push
from art.runtime.jobs.job import Payload, make_fingerprint
from art.runtime.jobs.runner import JobRunner
from art.runtime.models import Models
from art.runtime.registry import RegisteredModel
from art.runtime.script_logs import MetricStore
from art.runtime.supervision.waits import acquired
from art.storage import checkpoints
from art.storage.layout import validate_name

CHANGE_TIMEOUT_S = 600.0
"""Longest wait of a promotion or deletion for another one of the same model."""
FileRequest = TypeVar("FileRequest", ForkRequest, PullRequest, ExportRequest, PushRequest)


class ModelCheckpoints:
    """Lists, deletes and serves checkpoints of models, named by `project` and `name`, and queues jobs on
    them."""

    def __init__(self, models: Models, jobs: JobRunner, metrics: MetricStore, llama_cpp: str | None) -> None:
        """`llama_cpp` is the folder of llama.cpp for exports; `None` looks for it in the usual places."""
        self._models = models
        self._jobs = jobs
        self._metrics = metrics
        self._llama_cpp = llama_cpp
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One per model. Promotions and deletions hold it, so that no checkpoint is deleted while it is promoted."""

    async def list_all(self, project: str, name: str, best_metric: str) -> list[CheckpointInfo]:
        """List the published checkpoints of a model, in the order of steps.

        Args:
            best_metric: name of a logged metric. The checkpoint with its highest mean is marked as the best.
        """
        model, host = self._models.find(project, name)
        logged = await self._metrics.means(project, name)
        paths = self._models.paths(model)
        infos = await asyncio.to_thread(
            lambda: [
                _read(paths.checkpoint(step), step)
                for step in checkpoints.list_steps(paths.checkpoints)
                if step <= model.step
            ]
        )
        scores = {
            info.step: logged[info.step][best_metric] for info in infos if best_metric in logged.get(info.step, {})
        }
        best = max(scores, key=lambda step: (scores[step], step), default=None)
        needed = await self._in_use(model, host)
        return [
            info.model_copy(
                update={
                    "metrics": info.metrics | logged.get(info.step, {}),
                    "newest": info.step == model.step,
                    "best": info.step == best,
                    "in_use": needed.get(info.step, []),
                    "promoted": info.step == model.promoted_step,
                }
            )
            for info in infos
        ]

    def changing(self, model: RegisteredModel) -> AbstractAsyncContextManager[None]:
        """Make a context manager in which nobody else promotes or deletes checkpoints of the model.

        Raises:
            ProcessError: another promotion or deletion takes too long.
        """
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
        """List the files of a checkpoint, or of its export in the format `form`.

        Raises:
            NotFoundError: there is no such checkpoint or export.
        """
        path = self._models.folder(project, name, step, form)
        entries = await asyncio.to_thread(checkpoints.list_files, path)
        files = [FileInfo(name=name, size=entry.size, sha256=entry.sha256) for name, entry in entries.items()]
        manifest = path / checkpoints.MANIFEST
        own = FileInfo(name=manifest.name, size=manifest.stat().st_size, sha256=checkpoints.identify(path))
        return FileList(step=step, files=[*files, own])

    async def file(
        self, project: str, name: str, step: int, file: str, form: str | None = None
    ) -> tuple[Path, FileInfo]:
        """Return the path, size and hash of one file of a checkpoint or export.

        Raises:
            NotFoundError: there is no such checkpoint or export, or its manifest does not list the file.
        """
        for info in (await self.files(project, name, step, form)).files:
            if info.name == file:
                return self._models.folder(project, name, step, form) / file, info
        raise NotFoundError(f"step {step} of {project}/{name} has no file {file!r}", param="file")

    async def log_metrics(self, project: str, name: str, row: MetricsRow) -> None:
        self._models.find(project, name)
        await self._metrics.add(project, name, row)

    # -- jobs --

    async def fork(self, project: str, name: str, request: ForkRequest) -> JobStatus:
        """Queue a fork, a job that copies a checkpoint of another model into this one.

        `fork`, `pull`, `export` and `push` raise what the functions of `file_requests` raise, and a `ConflictError`
        if the job id belongs to another request.
        """
        return await self._submit("fork", project, name, request, plan_fork)

    async def pull(self, project: str, name: str, request: PullRequest) -> JobStatus:
        return await self._submit("pull", project, name, request, plan_pull)

    async def export(self, project: str, name: str, request: ExportRequest) -> JobStatus:
        plan = functools.partial(plan_export, llama_cpp=self._llama_cpp)
        return await self._submit("export", project, name, request, plan)

    async def push(self, project: str, name: str, request: PushRequest) -> JobStatus:
        return await self._submit("push", project, name, request, plan_push)

    async def _submit(
        self,
        kind: JobKind,
        project: str,
        name: str,
        request: FileRequest,
        plan: Callable[[Models, str, str, FileRequest], Payload],
    ) -> JobStatus:
        validate_name(project, param="project")
        validate_name(name, param="name")
        fingerprint = await asyncio.to_thread(make_fingerprint, f"{kind} {project}/{name}", request)
        if (known := await self._jobs.known(request.job_id, fingerprint)) is not None:
            return known
        payload = await asyncio.to_thread(plan, self._models, project, name, request)
        return await self._jobs.submit(request.job_id, kind, (project, name), payload, fingerprint)

    # -- inside --

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


def _read(path: Path, step: int) -> CheckpointInfo:
    return CheckpointInfo(
        step=step,
        created_at=checkpoints.created_at(path),
        size_bytes=sum(entry.size for entry in checkpoints.list_files(path).values()),
        full=checkpoints.is_full(path),
        metrics=checkpoints.read_state(path).metrics,
        newest=False,
        best=False,
    )
