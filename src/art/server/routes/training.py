"""Models, trainings and checkpoints. Each handler parses, calls the runtime and returns."""

from __future__ import annotations

from typing import Any

from art.errors import InvalidRequestError
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


async def register(call: Call) -> ModelStatus:
    return await call.runtime.register(await call.body(RegisterRequest))


async def model_status(call: Call) -> ModelStatus:
    return await call.runtime.model_status(call.path["project"], call.path["name"])


async def train(call: Call) -> JobStatus:
    request = await _job(call, TrainRequest)
    return await call.runtime.submit_train(call.path["project"], call.path["name"], request)


async def train_sft(call: Call) -> JobStatus:
    request = await _job(call, TrainSFTRequest)
    return await call.runtime.submit_train_sft(call.path["project"], call.path["name"], request)


async def preflight(call: Call) -> PreflightReport:
    request = await call.body(PreflightRequest)
    return await call.runtime.preflight(call.path["project"], call.path["name"], request)


async def list_checkpoints(call: Call) -> dict[str, Any]:
    return {"steps": await call.runtime.list_checkpoints(call.path["project"], call.path["name"])}


async def delete_checkpoints(call: Call) -> DeleteCheckpointsResponse:
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
    Route("POST", "/api/models", register),
    Route("GET", _MODEL, model_status),
    Route("POST", f"{_MODEL}/train", train, status=202),
    Route("POST", f"{_MODEL}/train_sft", train_sft, status=202),
    Route("POST", f"{_MODEL}/preflight", preflight),
    Route("GET", f"{_MODEL}/checkpoints", list_checkpoints),
    Route("POST", f"{_MODEL}/checkpoints/delete", delete_checkpoints),
]
