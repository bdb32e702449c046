"""Jobs on files: fork and pull, which give a model another checkpoint, and export and push.

`plan_...` turn requests into payloads. The step is chosen here, when it is asked for, so that the deletion of old
checkpoints knows which ones are needed. Each job runs in a process of its own (`file_child`). The process frees what it
loaded when it ends, and a cancelled job is stopped by killing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from art.errors import ConfigError, ConflictError, JobCancelledError, NotFoundError, ProcessError, error_from_code
from art.protocol.calls import Call, Copy, Export, Pull, Push
from art.protocol.checkpoint_calls import ExportRequest, ForkRequest, PullRequest, PushRequest, S3Target
from art.runtime.jobs.job import AdoptPayload, Done, Entry, FilePayload, Job, JobControl, JobStore
from art.runtime.jobs.runner import training_lane
from art.runtime.models import Models
from art.runtime.registry import RegisteredModel
from art.storage import checkpoints
from art.storage.layout import DataDir, validate_name
from art.storage.logs import describe_exit, log_tail, open_log


def plan_fork(models: Models, project: str, name: str, request: ForkRequest) -> AdoptPayload:
    """Plan the copy of a checkpoint of another model into the model `project/name`. Raises `NotFoundError` if there is
    no such model or step and `ConflictError` if source and target are the same model."""
    from_project = validate_name(request.from_project or project, param="from_project")
    from_name = validate_name(request.from_name, param="from_name")
    if (from_project, from_name) == (project, name):
        raise ConflictError(f"{project}/{name} cannot be forked into itself; give another name", param="from_name")
    source = models.by_key.get(f"{from_project}/{from_name}")
    paths = models.data_dir.model(from_project, from_name)
    steps = checkpoints.list_steps(paths.checkpoints)
    if source is not None:  # a step above the newest is being made, or its publish failed
        steps = [step for step in steps if step <= source.step]
    allowed = [step for step in steps if request.not_after_step is None or step <= request.not_after_step]
    step = request.step if request.step is not None else max(allowed, default=None)
    if step is None or step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise NotFoundError(f"{from_project}/{from_name} has no such checkpoint; its steps: {listed}", param="step")
    if source is not None:
        models.published(source, step)
    call = Copy(source=paths.checkpoint(step), target=models.data_dir.model(project, name).checkpoint(step))
    return AdoptPayload(call=call, step=step, origin=f"{from_project}/{from_name}")


def plan_pull(models: Models, project: str, name: str, request: PullRequest) -> AdoptPayload:
    from_project = validate_name(request.from_project or project, param="from_project")
    from_name = validate_name(request.from_name or name, param="from_name")
    place = f"{from_project}/models/{from_name}/checkpoints"
    call = Pull(
        source=request.source,
        place=place,
        step=request.step,
        not_after_step=request.not_after_step,
        checkpoints=models.data_dir.model(project, name).checkpoints,
    )
    origin = "/".join(part for part in ("s3:/", request.source.bucket, request.source.prefix.strip("/"), place) if part)
    return AdoptPayload(call=call, step=request.step, origin=origin)


def plan_export(models: Models, project: str, name: str, request: ExportRequest) -> FilePayload:
    model, _ = models.find(project, name)
    step = model.step if request.step is None else request.step
    call = Export(
        source=models.folder(project, name, step),
        target=models.paths(model).export(step, request.format),
        base_model=model.base_model,
        format=request.format,
        model_name=f"{model.key}@promoted" if step == model.promoted_step else f"{model.key}@{step}",
        template_kwargs=model.settings.render.chat_template_kwargs,
    )
    return FilePayload(call=call, step=step, result={"format": request.format})


def plan_push(models: Models, project: str, name: str, request: PushRequest) -> FilePayload:
    model, _ = models.find(project, name)
    step = model.step if request.step is None else request.step
    form = None if request.format == "checkpoint" else request.format
    folder = f"checkpoints/{step:04d}" if form is None else f"exports/{step:04d}-{form}"
    call = Push(
        source=models.folder(project, name, step, form),
        target=request.target,
        place=f"{model.project}/models/{model.name}/{folder}",
        message=f"{model.key} step {step}" + ("" if form is None else f" ({form})"),
    )
    kind = "s3" if isinstance(request.target, S3Target) else "hub"
    return FilePayload(call=call, step=step, result={"kind": kind})


LINE_BYTES = 2**20


async def run_file_call(call: Call[dict[str, Any]], log: Path, control: JobControl) -> dict[str, Any]:
    """Run one call in a process of its own (`file_child`) and return its result. A cancelled job kills the process.

    Raises:
        JobCancelledError: the job was cancelled.
        ProcessError: the process died.
        ArtError: the call raised it.
    """
    control.check()
    with open_log(log) as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "art.worker.file_child", stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=stderr, limit=LINE_BYTES,
        )  # fmt: skip

    async def kill_when_stopped() -> None:
        await control.stop.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    killing = asyncio.create_task(kill_when_stopped(), name=f"stop-{call.method}")
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(to_json({"call": call.method, "params": call.params}) + b"\n")
        answer: dict[str, Any] = {}
        async for line in process.stdout:
            answer = json.loads(line)
            if (progress := answer.get("progress")) is not None:
                await control.progress(call.method, *progress)
        status = await process.wait()
    finally:
        killing.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
    if "result" in answer:
        result: dict[str, Any] = answer["result"]
        return result
    if (error := answer.get("error")) is not None:
        raise error_from_code(error["code"], error["message"], param=error.get("param"))
    if control.stop.is_set():
        raise JobCancelledError(f"`{call.method}` was cancelled")
    raise ProcessError(f"the process of `{call.method}` died ({describe_exit(status)}){log_tail(log)}")


class FileWork:
    """Runs exports and pushes."""

    def __init__(self, data_dir: DataDir) -> None:
        self._log = data_dir.logs / "files.log"

    def lane(self, job: Entry) -> str:
        return "files"

    def from_step(self, job: Job) -> None:
        return None

    async def run(self, job: Job, from_step: int | None, control: JobControl) -> Done:
        assert isinstance(job.payload, FilePayload)
        call = job.payload.call
        result = await run_file_call(call, self._log, control) | job.payload.result
        if isinstance(call, Export):
            result["path"] = str(call.target)
        return Done({"step": job.payload.step, "result": result})


class AdoptWork:
    """Runs forks and pulls: a checkpoint from elsewhere becomes the newest of a model, registered or not."""

    def __init__(self, models: Models, store: JobStore) -> None:
        self._models = models
        self._store = store
        self._log = models.data_dir.logs / "files.log"

    def lane(self, job: Entry) -> str:
        model = self._models.by_key.get(job.model_key)
        return "files" if model is None else training_lane(model.base_model)

    def from_step(self, job: Job) -> int:
        """The model's newest step before the job first ran. A checkpoint that the job itself wrote does not count."""
        if job.from_step is not None:
            return job.from_step
        model = self._models.by_key.get(job.model_key)
        if model is not None:
            return model.step
        return checkpoints.latest(self._models.data_dir.model(job.project, job.name).checkpoints) or 0

    async def run(self, job: Job, from_step: int | None, control: JobControl) -> Done:
        payload = job.payload
        assert isinstance(payload, AdoptPayload)
        origin = payload.origin
        model = self._models.by_key.get(job.model_key)
        if from_step:
            if origin in await self._store.origins(job.project, job.name):
                finding = f"was begun from {origin} before, and continues at step {from_step}"
                return Done({"step": from_step, "findings": [finding], "result": {"origin": origin}})
            raise ConflictError(
                f"{job.model_key} is at step {from_step} already, and {origin} would take its place; choose "
                "another name",
                param="name",
            )
        if model is not None and payload.step == 0:
            finding = "step 0 of every model is its base model: there is nothing to copy"
            return Done({"step": 0, "findings": [finding], "result": {"origin": origin}})
        result = await run_file_call(payload.call, self._log, control)
        step = int(result["step"]) if payload.step is None else payload.step
        target = self._models.data_dir.model(job.project, job.name).checkpoint(step)
        changes = {"step": step, "result": {"origin": origin}, "checkpoint_path": str(target)}
        if model is None:
            return Done(changes)
        try:
            _check_same(model, target)
            identity = await asyncio.to_thread(checkpoints.identify, target)
            if step > 0:
                _, host = self._models.find(job.project, job.name)
                await host.adapters.load(model.adapter_id(step), target)
        except BaseException:
            if step > 0:
                await asyncio.to_thread(checkpoints.delete, target)
            raise
        return Done(changes, published_step=step, identity=identity)


def _check_same(model: RegisteredModel, checkpoint: Path) -> None:
    state = checkpoints.read_state(checkpoint)
    lora = None if model.settings.lora is None else model.settings.lora.model_dump(mode="json")
    if (state.base_model, state.lora) != (model.base_model, lora):
        raise ConfigError(
            f"the checkpoint is of base model {state.base_model!r} with LoRA settings {state.lora}, and {model.key} of "
            f"{model.base_model!r} with {lora} (None is full fine-tuning); fork into a model with the same"
        )
