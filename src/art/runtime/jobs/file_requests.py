"""From requests for forks, exports, pushes and pulls to what their jobs run: steps are settled when they are asked for,
so that retention knows what is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art.errors import ConflictError, NotFoundError
from art.protocol.checkpoint_calls import ExportRequest, ForkRequest, PullRequest, PushRequest, S3Target
from art.runtime.registry import RegisteredModel
from art.storage import checkpoints
from art.storage.layout import DataDir, validate_name


@dataclass(frozen=True, slots=True)
class FileJob:
    payload: dict[str, Any]
    needs: list[str] = field(default_factory=list)
    """Checkpoints that must stay until it is over."""


def plan_fork(
    data_dir: DataDir, project: str, name: str, request: ForkRequest, find: Callable[[str, str], RegisteredModel | None]
) -> FileJob:
    """
    Raises:
        NotFoundError: there is no such model or step.
        ConflictError: from a model into itself.
    """
    from_project = validate_name(request.from_project or project, param="from_project")
    from_name = validate_name(request.from_name, param="from_name")
    if (from_project, from_name) == (project, name):
        raise ConflictError(f"{project}/{name} cannot be forked into itself; give another name", param="from_name")
    source, paths = find(from_project, from_name), data_dir.model(from_project, from_name)
    steps = checkpoints.list_steps(paths.checkpoints)
    if source is not None:  # one above it is being made, or failed to be published
        steps = [step for step in steps if step <= source.step]
    below = [step for step in steps if request.not_after_step is None or step <= request.not_after_step]
    step = request.step if request.step is not None else max(below, default=None)
    if step is None or step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise NotFoundError(f"{from_project}/{from_name} has no such checkpoint; its steps: {there}", param="step")
    path = paths.checkpoint(step)
    params = {"source": str(path), "target": str(data_dir.model(project, name).checkpoint(step))}
    origin = f"{from_project}/{from_name}"
    return FileJob({"call": "copy", "params": params, "step": step, "origin": origin}, needs=[str(path)])


def plan_pull(data_dir: DataDir, project: str, name: str, request: PullRequest) -> FileJob:
    from_project = validate_name(request.from_project or project, param="from_project")
    from_name = validate_name(request.from_name or name, param="from_name")
    place = f"{from_project}/models/{from_name}/checkpoints"
    params = {
        "source": request.source.model_dump(),
        "place": place,
        "step": request.step,
        "not_after_step": request.not_after_step,
        "checkpoints": str(data_dir.model(project, name).checkpoints),
    }
    origin = "/".join(part for part in ("s3:/", request.source.bucket, request.source.prefix.strip("/"), place) if part)
    return FileJob({"call": "pull", "params": params, "step": request.step, "origin": origin})


def plan_export(
    data_dir: DataDir,
    model: RegisteredModel,
    request: ExportRequest,
    path_of: Callable[[int], Path],
    llama_cpp: str | None,
) -> FileJob:
    step = model.step if request.step is None else request.step
    source = path_of(step)
    target = data_dir.model(model.project, model.name).export(step, request.format)
    params = {
        "source": str(source),
        "target": str(target),
        "base_model": model.base_model,
        "format": request.format,
        "llama_cpp": llama_cpp,
    }
    result = {"path": str(target), "format": request.format}
    return FileJob({"call": "export", "params": params, "step": step, "result": result}, needs=[str(source)])


def plan_push(model: RegisteredModel, request: PushRequest, path_of: Callable[[int, str | None], Path]) -> FileJob:
    step = model.step if request.step is None else request.step
    form = None if request.format == "checkpoint" else request.format
    source = path_of(step, form)
    what = f"{step:04d}" if form is None else f"{step:04d}-{form}"
    folder = "checkpoints" if form is None else "exports"
    params = {
        "source": str(source),
        "target": request.target.model_dump(),
        "place": f"{model.project}/models/{model.name}/{folder}/{what}",
        "message": f"{model.key} step {step}" + ("" if form is None else f" ({form})"),
    }
    kind = "s3" if isinstance(request.target, S3Target) else "hub"
    return FileJob({"call": "push", "params": params, "step": step, "result": {"kind": kind}}, needs=[str(source)])
