"""Turn requests for forks, exports, pushes and pulls into payloads of jobs. The step is chosen here, when it is asked
for, so that the deletion of old checkpoints knows which ones are needed. `project` and `name` are those of the model
that the request is for."""

from __future__ import annotations

from art.errors import ConflictError, NotFoundError
from art.protocol.calls import Copy, Export, Pull, Push
from art.protocol.checkpoint_calls import ExportRequest, ForkRequest, PullRequest, PushRequest, S3Target
from art.runtime.jobs.job import AdoptPayload, FilePayload
from art.runtime.models import Models
from art.storage import checkpoints
from art.storage.layout import validate_name


def plan_fork(models: Models, project: str, name: str, request: ForkRequest) -> AdoptPayload:
    """Plan the copy of a checkpoint of another model into the model `project/name`.

    Raises:
        NotFoundError: there is no such model or step.
        ConflictError: source and target are the same model.
    """
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


def plan_export(
    models: Models, project: str, name: str, request: ExportRequest, *, llama_cpp: str | None
) -> FilePayload:
    model, _ = models.find(project, name)
    step = model.step if request.step is None else request.step
    call = Export(
        source=models.folder(project, name, step),
        target=models.paths(model).export(step, request.format),
        base_model=model.base_model,
        format=request.format,
        llama_cpp=llama_cpp,
        model_name=f"{model.key}@promoted" if step == model.promoted_step else f"{model.key}@{step}",
        template_kwargs=model.settings.render.chat_template_kwargs,
    )
    return FilePayload(call=call, step=step, result={"path": str(call.target), "format": request.format})


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
