"""Turn requests for forks, exports, pushes and pulls into payloads of jobs. The step is chosen here, when it is asked
for, so that the deletion of old checkpoints knows which ones are needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from art.errors import ConflictError, NotFoundError
from art.protocol.calls import Copy, Export, Pull, Push
from art.protocol.checkpoint_calls import ExportRequest, ForkRequest, PullRequest, PushRequest, S3Target
from art.runtime.jobs.job import AdoptPayload, FilePayload
from art.runtime.registry import RegisteredModel
from art.storage import checkpoints
from art.storage.layout import DataDir, validate_name


def plan_fork(
    data_dir: DataDir, project: str, name: str, request: ForkRequest, find: Callable[[str, str], RegisteredModel | None]
) -> AdoptPayload:
    """
    Args:
        find: returns the model of a project and name, or `None` if it is not registered.

    Raises:
        NotFoundError: there is no such model or step.
        ConflictError: source and target are the same model.
    """
    from_project = validate_name(request.from_project or project, param="from_project")
    from_name = validate_name(request.from_name, param="from_name")
    if (from_project, from_name) == (project, name):
        raise ConflictError(f"{project}/{name} cannot be forked into itself; give another name", param="from_name")
    source, paths = find(from_project, from_name), data_dir.model(from_project, from_name)
    steps = checkpoints.list_steps(paths.checkpoints)
    if source is not None:  # a step above the newest is being made, or its publish failed
        steps = [step for step in steps if step <= source.step]
    allowed = [step for step in steps if request.not_after_step is None or step <= request.not_after_step]
    step = request.step if request.step is not None else max(allowed, default=None)
    if step is None or step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise NotFoundError(f"{from_project}/{from_name} has no such checkpoint; its steps: {listed}", param="step")
    call = Copy(source=paths.checkpoint(step), target=data_dir.model(project, name).checkpoint(step))
    return AdoptPayload(call=call, step=step, origin=f"{from_project}/{from_name}")


def plan_pull(data_dir: DataDir, project: str, name: str, request: PullRequest) -> AdoptPayload:
    from_project = validate_name(request.from_project or project, param="from_project")
    from_name = validate_name(request.from_name or name, param="from_name")
    place = f"{from_project}/models/{from_name}/checkpoints"
    call = Pull(
        source=request.source,
        place=place,
        step=request.step,
        not_after_step=request.not_after_step,
        checkpoints=data_dir.model(project, name).checkpoints,
    )
    origin = "/".join(part for part in ("s3:/", request.source.bucket, request.source.prefix.strip("/"), place) if part)
    return AdoptPayload(call=call, step=request.step, origin=origin)


def plan_export(
    data_dir: DataDir,
    model: RegisteredModel,
    request: ExportRequest,
    path_of: Callable[[int], Path],
    llama_cpp: str | None,
) -> FilePayload:
    step = model.step if request.step is None else request.step
    call = Export(
        source=path_of(step),
        target=data_dir.model(model.project, model.name).export(step, request.format),
        base_model=model.base_model,
        format=request.format,
        llama_cpp=llama_cpp,
    )
    return FilePayload(call=call, step=step, result={"path": str(call.target), "format": request.format})


def plan_push(model: RegisteredModel, request: PushRequest, path_of: Callable[[int, str | None], Path]) -> FilePayload:
    step = model.step if request.step is None else request.step
    form = None if request.format == "checkpoint" else request.format
    folder = f"checkpoints/{step:04d}" if form is None else f"exports/{step:04d}-{form}"
    call = Push(
        source=path_of(step, form),
        target=request.target,
        place=f"{model.project}/models/{model.name}/{folder}",
        message=f"{model.key} step {step}" + ("" if form is None else f" ({form})"),
    )
    kind = "s3" if isinstance(request.target, S3Target) else "hub"
    return FilePayload(call=call, step=step, result={"kind": kind})
