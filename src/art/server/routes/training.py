"""Models, trainings and checkpoints. Each handler parses, calls the runtime and returns."""

from __future__ import annotations

from art.config import DistillConfig
from art.errors import InvalidRequestError
from art.protocol.answers import CheckpointList
from art.protocol.preflight import PreflightReport, PreflightRequest
from art.protocol.training import (
    DeleteCheckpointsRequest,
    DeleteCheckpointsResponse,
    JobStatus,
    ModelStatus,
    RegisterRequest,
    TrainRequest,
    TrainSFTRequest,
)
from art.server.call import Call, Route, W
from art.server.machine import check_registration


async def register(call: Call) -> ModelStatus:
    """Make a model known and ready to be sampled from and trained."""
    request = await call.body(RegisterRequest)
    call.caller.check_project(request.project)
    check_registration(request, call.caller, call.server.config)
    return await call.runtime.register(request)


async def model_status(call: Call) -> ModelStatus:
    """A model and its newest step."""
    return await call.runtime.model_status(call.path["project"], call.path["name"])


async def train(call: Call) -> JobStatus:
    """Queue a training step on groups of trajectories."""
    request = await _job(call, TrainRequest)
    for term in request.config.terms:
        if isinstance(term, DistillConfig):
            await call.own_model(term.teacher)
    return await call.runtime.submit_train(call.path["project"], call.path["name"], request)


async def train_sft(call: Call) -> JobStatus:
    """Queue supervised fine-tuning."""
    request = await _job(call, TrainSFTRequest)
    return await call.runtime.submit_train_sft(call.path["project"], call.path["name"], request)


async def preflight(call: Call) -> PreflightReport:
    """Look at what training this model needs."""
    request = await call.body(PreflightRequest)
    return await call.runtime.preflight(call.path["project"], call.path["name"], request)


async def list_checkpoints(call: Call) -> CheckpointList:
    """The steps that are on disk."""
    return CheckpointList(steps=await call.runtime.list_checkpoints(call.path["project"], call.path["name"]))


async def delete_checkpoints(call: Call) -> DeleteCheckpointsResponse:
    """Delete all checkpoints but those named and the newest."""
    request = await call.body(DeleteCheckpointsRequest)
    deleted = await call.runtime.delete_checkpoints(call.path["project"], call.path["name"], request.keep_steps)
    return DeleteCheckpointsResponse(deleted_steps=deleted)


async def _job(call: Call, kind: type[W]) -> W:
    """The request for a job, whose id may also come as the header `Idempotency-Key`."""
    body = await call.json()
    header = next((value.decode("latin-1") for key, value in call.scope["headers"] if key == b"idempotency-key"), None)
    if header is not None and isinstance(body, dict) and body.setdefault("job_id", header) != header:
        raise InvalidRequestError(
            f"the header Idempotency-Key says {header!r} and `job_id` says {body['job_id']!r}; leave one out",
            param="job_id",
        )
    return kind.model_validate(body)


_MODEL = "/api/models/{project}/{name}"
ROUTES = [
    Route("POST", "/api/models", register, scope="train", request=RegisterRequest, response=ModelStatus),
    Route("GET", _MODEL, model_status, scope="infer", response=ModelStatus),
    Route("POST", f"{_MODEL}/train", train, scope="train", request=TrainRequest, response=JobStatus, status=202),
    Route(
        "POST", f"{_MODEL}/train_sft", train_sft, scope="train", request=TrainSFTRequest, response=JobStatus, status=202
    ),
    Route("POST", f"{_MODEL}/preflight", preflight, scope="train", request=PreflightRequest, response=PreflightReport),
    Route("GET", f"{_MODEL}/checkpoints", list_checkpoints, scope="infer", response=CheckpointList),
    Route(
        "POST",
        f"{_MODEL}/checkpoints/delete",
        delete_checkpoints,
        scope="train",
        request=DeleteCheckpointsRequest,
        response=DeleteCheckpointsResponse,
    ),
]
