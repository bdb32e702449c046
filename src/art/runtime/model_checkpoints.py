"""The checkpoints of a model on the server: listed, kept by a rule, read file by file.

A rule of retention may name what to keep; whatever it says, these are never deleted: the newest, the best by a metric,
and those in use: sampled from right now, or needed by a job that is not over.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

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
from art.runtime.jobs.file_requests import FileJob, plan_export, plan_fork, plan_pull, plan_push
from art.runtime.jobs.runner import JobRunner
from art.runtime.jobs.store import JobStore
from art.runtime.metric_store import MetricStore
from art.runtime.registry import RegisteredModel
from art.storage import checkpoints
from art.storage.layout import DataDir, ModelPaths, validate_name

FileRequest = ForkRequest | PullRequest | ExportRequest | PushRequest


class ModelCheckpoints:
    def __init__(
        self,
        data_dir: DataDir,
        find: Callable[[str, str], tuple[RegisteredModel, BaseModelHost]],
        jobs: JobRunner,
        job_store: JobStore,
        metrics: MetricStore,
        llama_cpp: str | None,
    ) -> None:
        """`find` raises a `NotFoundError` for a model that is not registered."""
        self._data_dir = data_dir
        self._find = find
        self._jobs = jobs
        self._job_store = job_store
        self._metrics = metrics
        self._llama_cpp = llama_cpp

    async def list_all(self, project: str, name: str, best_metric: str) -> list[CheckpointInfo]:
        """In the order of steps; those above the newest published one are not there yet."""
        model, host = self._find(project, name)
        paths = self._data_dir.model(project, name)
        logged = await self._metrics.means(project, name)
        found = await asyncio.to_thread(_read_all, paths, model.step)
        scores = {
            info.step: logged[info.step][best_metric] for info in found if best_metric in logged.get(info.step, {})
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
                }
            )
            for info in found
        ]

    async def delete(self, project: str, name: str, request: DeleteCheckpointsRequest) -> list[int]:
        """Delete all that neither the request nor the rule above keeps; the steps that are gone."""
        model, host = self._find(project, name)
        infos = await self.list_all(project, name, request.best_metric)
        keep = {*request.keep_steps, *[info.step for info in infos][-request.keep_recent :]}
        gone = []
        for info in infos:
            if info.step in keep or info.newest or info.best or info.in_use:
                continue
            await host.adapters.forget(model.adapter_id(info.step))
            await asyncio.to_thread(checkpoints.delete, self._data_dir.model(project, name).checkpoint(info.step))
            gone.append(info.step)
        return gone

    async def files(self, project: str, name: str, step: int, form: str | None = None) -> FileList:
        """Of a checkpoint, or of its export in a format.

        Raises:
            NotFoundError: there is none.
        """
        path = self.path(project, name, step, form)
        entries = await asyncio.to_thread(checkpoints.list_files, path)
        files = [FileInfo(name=name, size=entry.size, sha256=entry.sha256) for name, entry in entries.items()]
        manifest = path / checkpoints.MANIFEST
        own = FileInfo(name=manifest.name, size=manifest.stat().st_size, sha256=checkpoints.identify(path))
        return FileList(step=step, files=[*files, own])

    async def file(
        self, project: str, name: str, step: int, file: str, form: str | None = None
    ) -> tuple[Path, FileInfo]:
        """Where a file of the list lies. Only those of the manifest are given out."""
        for info in (await self.files(project, name, step, form)).files:
            if info.name == file:
                return self.path(project, name, step, form) / file, info
        raise NotFoundError(f"step {step} of {project}/{name} has no file {file!r}", param="file")

    def path(self, project: str, name: str, step: int, form: str | None = None) -> Path:
        """
        Raises:
            NotFoundError: no such checkpoint is published, or no such export made.
        """
        model, _ = self._find(project, name)
        paths = self._data_dir.model(project, name)
        path = paths.checkpoint(step) if form is None else paths.export(step, form)
        if step > model.step or not path.is_dir():
            what = "checkpoint" if form is None else f"export as {form!r}"
            raise NotFoundError(
                f"{model.key} has no {what} of step {step}; its newest step is {model.step}", param="step"
            )
        return path

    async def log_metrics(self, project: str, name: str, row: MetricsRow) -> None:
        self._find(project, name)
        await self._metrics.add(project, name, row)

    # -- jobs --

    async def fork(self, project: str, name: str, request: ForkRequest) -> JobStatus:
        """Raises, as those below: what the functions of `file_requests` do, and `ConflictError` for a taken job id."""
        return await self._submit(
            "fork", project, name, request, lambda: plan_fork(self._data_dir, project, name, request, self._registered)
        )

    async def pull(self, project: str, name: str, request: PullRequest) -> JobStatus:
        return await self._submit(
            "pull", project, name, request, lambda: plan_pull(self._data_dir, project, name, request)
        )

    async def export(self, project: str, name: str, request: ExportRequest) -> JobStatus:
        model, _ = self._find(project, name)
        return await self._submit(
            "export", project, name, request,
            lambda: plan_export(
                self._data_dir, model, request, lambda step: self.path(project, name, step), self._llama_cpp
            ),
        )  # fmt: skip

    async def push(self, project: str, name: str, request: PushRequest) -> JobStatus:
        model, _ = self._find(project, name)
        return await self._submit(
            "push", project, name, request,
            lambda: plan_push(model, request, lambda step, form: self.path(project, name, step, form)),
        )  # fmt: skip

    async def _submit(
        self, kind: JobKind, project: str, name: str, request: FileRequest, plan: Callable[[], FileJob]
    ) -> JobStatus:
        validate_name(project, param="project")
        validate_name(name, param="name")
        words = f"{kind} {project}/{name} {request.model_dump_json()}"
        fingerprint = zlib.crc32(words.encode())
        if (known := await self._jobs.known(request.job_id, fingerprint)) is not None:
            return known
        job = await asyncio.to_thread(plan)
        return await self._jobs.submit(request.job_id, kind, (project, name), job.payload, fingerprint, job.needs)

    # -- inside --

    async def _in_use(self, model: RegisteredModel, host: BaseModelHost) -> dict[int, list[str]]:
        """What needs each step, in words."""
        needed: dict[int, list[str]] = defaultdict(list)
        for adapter, count in host.engine.in_use.items():
            key, _, step = (adapter or "").rpartition("@")
            if count > 0 and key == model.key:
                needed[int(step)].append(f"{count} requests")
        directory = self._data_dir.model(model.project, model.name).checkpoints
        for path in map(Path, await self._job_store.needed()):
            if path.parent == directory:
                needed[int(path.name)].append("a job")
        return needed

    def _registered(self, project: str, name: str) -> RegisteredModel | None:
        try:
            return self._find(project, name)[0]
        except NotFoundError:
            return None


def _read_all(paths: ModelPaths, newest: int) -> list[CheckpointInfo]:
    infos = []
    for step in checkpoints.list_steps(paths.checkpoints):
        path = paths.checkpoint(step)
        if step > newest:
            continue
        state = checkpoints.read_state(path)
        infos.append(
            CheckpointInfo(
                step=step,
                created_at=checkpoints.created_at(path),
                size_bytes=sum(entry.size for entry in checkpoints.list_files(path).values()),
                full=checkpoints.is_full(path),
                metrics=state.metrics,
                newest=False,
                best=False,
            )
        )
    return infos
