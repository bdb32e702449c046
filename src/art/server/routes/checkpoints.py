"""Checkpoints of a model: list, promote and delete them, download files, and queue jobs that copy, export and send
them."""

from __future__ import annotations

from typing import Any

from starlette.responses import FileResponse

from art.errors import InvalidRequestError, PermissionDeniedError
from art.protocol.checkpoint_calls import (
    BEST_METRIC,
    CheckpointList,
    ExportRequest,
    FileList,
    ForkRequest,
    MetricsRow,
    PullRequest,
    PushRequest,
    Recorded,
)
from art.protocol.organisation.promotions import PromoteRequest, Promotion, PromotionHistory
from art.protocol.training import DeleteCheckpointsRequest, DeleteCheckpointsResponse, JobStatus
from art.server.call import Call, Route


async def list_checkpoints(call: Call) -> CheckpointList:
    """List the checkpoints of a model with their metrics. The best one has the highest mean of `metric`."""
    metric = call.query("metric") or BEST_METRIC
    checkpoints = await call.runtime.checkpoints.list_all(*_model(call), metric)
    return CheckpointList(steps=[info.step for info in checkpoints], checkpoints=checkpoints)


async def delete_checkpoints(call: Call) -> DeleteCheckpointsResponse:
    """Delete the checkpoints of a model except the named ones, the newest, the best, the promoted, and those in use."""
    request = await call.body(DeleteCheckpointsRequest)
    return DeleteCheckpointsResponse(deleted_steps=await call.runtime.checkpoints.delete(*_model(call), request))


async def promote(call: Call) -> dict[str, Any]:
    """Make a checkpoint the one that `project/name@promoted` means, and keep it from every deletion."""
    return await _promote(call, PromoteRequest(step=_step(call)))


async def promote_by_gate(call: Call) -> dict[str, Any]:
    """Promote a checkpoint if its held-out improvement over the promoted one is certain enough; 409 if it is not.

    `force` needs a key with scope `admin` if the server requires a gate.
    """
    request = await call.body(PromoteRequest)
    if request.force and call.runtime.promotions.required is not None and not call.caller.may("admin"):
        raise PermissionDeniedError(
            f"this server requires a gate of every promotion, and `force` goes against it: that needs a key with scope "
            f"`admin`, and key {call.caller.key_id} has {', '.join(sorted(call.caller.scopes))}",
            param="force",
        )
    return await _promote(call, request)


async def _promote(call: Call, request: PromoteRequest) -> dict[str, Any]:
    promotion: Promotion = await call.runtime.promotions.promote(*_model(call), request, call.caller.key_id)
    return promotion.model_dump(mode="json")  # as the wire type writes itself; the server writes models field by field


async def list_promotions(call: Call) -> PromotionHistory:
    """The decisions about the promoted checkpoint of a model, oldest first, refusals included."""
    return await call.runtime.promotions.history(*_model(call))


async def list_files(call: Call) -> FileList:
    """List the files of a checkpoint, or of its export in a format, with their SHA-256 hashes."""
    return await call.runtime.checkpoints.files(*_model(call), _step(call), call.path.get("format"))


async def get_file(call: Call) -> FileResponse:
    """Download one file of a checkpoint or export. `Range` and `If-Range` resume a download that broke off."""
    path, info = await call.runtime.checkpoints.file(
        *_model(call), _step(call), call.path["file"], call.path.get("format")
    )
    fields = {"etag": f'"{info.sha256}"'}  # what `If-Range` compares
    return FileResponse(path, headers=fields, media_type="application/octet-stream")


async def log_metrics(call: Call) -> Recorded:
    """Store metrics that were measured at a step, so that the server knows the best checkpoint."""
    row = await call.body(MetricsRow)
    await call.runtime.checkpoints.log_metrics(*_model(call), row)
    return Recorded(row_id=row.row_id)


async def fork(call: Call) -> JobStatus:
    """Queue a job that copies another model's checkpoint, as the newest checkpoint of this model."""
    request = await call.job_body(ForkRequest)
    if request.from_project is not None:
        call.caller.check_project(request.from_project)
    return await call.runtime.checkpoints.fork(*_model(call), request)


async def export(call: Call) -> JobStatus:
    """Queue a job that exports a checkpoint in a format for other programs."""
    return await call.runtime.checkpoints.export(*_model(call), await call.job_body(ExportRequest))


async def push(call: Call) -> JobStatus:
    """Queue a job that sends a checkpoint or export to a hub or store, with the server's own credentials."""
    return await call.runtime.checkpoints.push(*_model(call), await call.job_body(PushRequest))


async def pull(call: Call) -> JobStatus:
    """Queue a job that fetches a checkpoint from a store, with the server's own credentials."""
    request = await call.job_body(PullRequest)
    if request.from_project is not None:
        call.caller.check_project(request.from_project)
    return await call.runtime.checkpoints.pull(*_model(call), request)


def _model(call: Call) -> tuple[str, str]:
    return call.path["project"], call.path["name"]


def _step(call: Call) -> int:
    text = call.path["step"]
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidRequestError(f"`step` must be a whole number, got {text[:40]!r}", param="step")
    return int(text)


_MODEL = "/api/models/{project}/{name}"
_STEP = f"{_MODEL}/checkpoints/{{step}}"
_EXPORT = f"{_STEP}/exports/{{format}}"
_BYTES = ("application/octet-stream",)
ROUTES = [
    Route(
        "GET", f"{_MODEL}/checkpoints", list_checkpoints, scope="infer", response=CheckpointList,
        query={"metric": str}, from_page=True,
    ),
    Route(
        "POST", f"{_MODEL}/checkpoints/delete", delete_checkpoints, scope="train", request=DeleteCheckpointsRequest,
        response=DeleteCheckpointsResponse, from_page=True,
    ),
    Route("POST", f"{_STEP}/promote", promote, scope="train", response=Promotion, from_page=True),
    Route(
        "POST", f"{_MODEL}/promotions", promote_by_gate, scope="train", request=PromoteRequest, response=Promotion
    ),
    Route("GET", f"{_MODEL}/promotions", list_promotions, scope="infer", response=PromotionHistory, from_page=True),
    Route("GET", f"{_STEP}/files", list_files, scope="train", response=FileList, from_page=True),
    Route("GET", f"{_STEP}/files/{{file}}", get_file, scope="train", media=_BYTES, from_page=True),
    Route("GET", f"{_EXPORT}/files", list_files, scope="train", response=FileList, from_page=True),
    Route("GET", f"{_EXPORT}/files/{{file}}", get_file, scope="train", media=_BYTES, from_page=True),
    Route("POST", f"{_MODEL}/metrics", log_metrics, scope="train", request=MetricsRow, response=Recorded),
    Route(
        "POST", f"{_MODEL}/fork", fork, scope="train", request=ForkRequest, response=JobStatus, status=202,
        from_page=True,
    ),
    Route(
        "POST", f"{_MODEL}/export", export, scope="train", request=ExportRequest, response=JobStatus, status=202,
        from_page=True,
    ),
    # These use the server's own credentials, with an address that the caller chooses.
    Route("POST", f"{_MODEL}/push", push, scope="admin", request=PushRequest, response=JobStatus, status=202),
    Route("POST", f"{_MODEL}/pull", pull, scope="admin", request=PullRequest, response=JobStatus, status=202),
]  # fmt: skip
