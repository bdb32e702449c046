"""Checkpoints of a model: list, promote and delete them, download files, and queue jobs that copy, export and send
them."""

from __future__ import annotations

from typing import Any

from starlette.responses import FileResponse

from art.errors import PermissionDeniedError
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
from art.protocol.promotions import PromoteRequest, Promotion, PromotionHistory
from art.protocol.training import DeleteCheckpointsRequest, DeleteCheckpointsResponse, JobStatus
from art.server.call import ApiCall, Routes

_MODEL = "/api/models/{project}/{name}"
_STEP = f"{_MODEL}/checkpoints/{{step}}"
_EXPORT = f"{_STEP}/exports/{{format}}"
_BYTES = ("application/octet-stream",)
ROUTES = Routes()


@ROUTES.add("GET", f"{_MODEL}/checkpoints", scope="infer", query={"metric": str}, from_page=True)
async def list_checkpoints(call: ApiCall) -> CheckpointList:
    """List the checkpoints of a model with their metrics. The best one has the highest mean of `metric`."""
    metric = call.query("metric") or BEST_METRIC
    checkpoints = await call.runtime.checkpoints.list_all(*call.model, metric)
    return CheckpointList(steps=[info.step for info in checkpoints], checkpoints=checkpoints)


@ROUTES.add("POST", f"{_MODEL}/checkpoints/delete", scope="train", from_page=True)
async def delete_checkpoints(call: ApiCall, request: DeleteCheckpointsRequest) -> DeleteCheckpointsResponse:
    """Delete the checkpoints of a model except the named ones, the newest, the best, the promoted, and those in use."""
    return DeleteCheckpointsResponse(deleted_steps=await call.runtime.checkpoints.delete(*call.model, request))


@ROUTES.add("POST", f"{_STEP}/promote", scope="train", response=Promotion, from_page=True)
async def promote(call: ApiCall) -> dict[str, Any]:
    """Make a checkpoint the one that `project/name@promoted` means, and keep it from every deletion."""
    return await _promote(call, PromoteRequest(step=call.step))


@ROUTES.add("POST", f"{_MODEL}/promotions", scope="train", response=Promotion)
async def promote_by_gate(call: ApiCall, request: PromoteRequest) -> dict[str, Any]:
    """Promote a checkpoint if its held-out improvement over the promoted one is certain enough; 409 if it is not.

    `force` needs a key with scope `admin` if the server requires a gate.
    """
    if request.force and call.runtime.promotions.required is not None and not call.caller.may("admin"):
        raise PermissionDeniedError(
            f"this server requires a gate of every promotion, and `force` goes against it: that needs a key with scope "
            f"`admin`, and key {call.caller.key_id} has {', '.join(sorted(call.caller.scopes))}",
            param="force",
        )
    return await _promote(call, request)


async def _promote(call: ApiCall, request: PromoteRequest) -> dict[str, Any]:
    promotion: Promotion = await call.runtime.promotions.promote(*call.model, request, call.caller.key_id)
    return promotion.model_dump(mode="json")  # as the wire type writes itself; the server writes models field by field


@ROUTES.add("GET", f"{_MODEL}/promotions", scope="infer", from_page=True)
async def list_promotions(call: ApiCall) -> PromotionHistory:
    """The decisions about the promoted checkpoint of a model, oldest first, refusals included."""
    return await call.runtime.promotions.history(*call.model)


@ROUTES.add("GET", f"{_STEP}/files", f"{_EXPORT}/files", scope="train", from_page=True)
async def list_files(call: ApiCall) -> FileList:
    """List the files of a checkpoint, or of its export in a format, with their SHA-256 hashes."""
    return await call.runtime.checkpoints.files(*call.model, call.step, call.path.get("format"))


@ROUTES.add("GET", f"{_STEP}/files/{{file}}", f"{_EXPORT}/files/{{file}}", scope="train", media=_BYTES, from_page=True)
async def get_file(call: ApiCall) -> FileResponse:
    """Download one file of a checkpoint or export. `Range` and `If-Range` resume a download that broke off."""
    path, info = await call.runtime.checkpoints.file(*call.model, call.step, call.path["file"], call.path.get("format"))
    fields = {"etag": f'"{info.sha256}"'}  # what `If-Range` compares
    return FileResponse(path, headers=fields, media_type="application/octet-stream")


@ROUTES.add("POST", f"{_MODEL}/metrics", scope="train")
async def log_metrics(call: ApiCall, request: MetricsRow) -> Recorded:
    """Store metrics that were measured at a step, so that the server knows the best checkpoint."""
    await call.runtime.checkpoints.log_metrics(*call.model, request)
    return Recorded(row_id=request.row_id)


@ROUTES.add("POST", f"{_MODEL}/fork", scope="train", status=202, from_page=True)
async def fork(call: ApiCall, request: ForkRequest) -> JobStatus:
    """Queue a job that copies another model's checkpoint, as the newest checkpoint of this model."""
    if request.from_project is not None:
        call.caller.check_project(request.from_project)
    return await call.runtime.checkpoints.submit(*call.model, request)


@ROUTES.add("POST", f"{_MODEL}/export", scope="train", status=202, from_page=True)
async def export(call: ApiCall, request: ExportRequest) -> JobStatus:
    """Queue a job that exports a checkpoint in a format for other programs."""
    return await call.runtime.checkpoints.submit(*call.model, request)


# Push and pull use the server's own credentials, with an address that the caller chooses.
@ROUTES.add("POST", f"{_MODEL}/push", scope="admin", status=202)
async def push(call: ApiCall, request: PushRequest) -> JobStatus:
    """Queue a job that sends a checkpoint or export to a hub or store, with the server's own credentials."""
    return await call.runtime.checkpoints.submit(*call.model, request)


@ROUTES.add("POST", f"{_MODEL}/pull", scope="admin", status=202)
async def pull(call: ApiCall, request: PullRequest) -> JobStatus:
    """Queue a job that fetches a checkpoint from a store, with the server's own credentials."""
    if request.from_project is not None:
        call.caller.check_project(request.from_project)
    return await call.runtime.checkpoints.submit(*call.model, request)
