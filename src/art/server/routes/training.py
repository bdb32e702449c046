"""Register models and train them."""

from __future__ import annotations

from pathlib import Path

from art.config import CustomLossConfig, DistillConfig
from art.protocol.answers import EnginePressure
from art.protocol.checkpoint_calls import Logged, LogRequest
from art.protocol.preflight import PreflightReport, PreflightRequest
from art.protocol.training import (
    ExchangeIds,
    JobStatus,
    ModelStatus,
    RegisterRequest,
    TrainRequest,
    TrainSFTRequest,
)
from art.server.call import Call, Route
from art.server.machine import check_base_folder, check_custom_loss, check_registration


async def register(call: Call) -> ModelStatus:
    """Register a model, so that it can be sampled from and trained."""
    request = await call.body(RegisterRequest)
    call.caller.check_project(request.project)
    check_registration(request, call.caller, call.server.config)

    def check_folder(folder: Path) -> None:
        check_base_folder(folder, call.caller, call.server.config, call.server.paths.data_dir)

    return await call.runtime.registration.register(request, check_folder)


async def model_status(call: Call) -> ModelStatus:
    """Return a model's status, with its newest step and its token counts."""
    return await call.runtime.models.status(call.path["project"], call.path["name"])


async def pressure(call: Call) -> EnginePressure:
    """Return how busy the engine of a model is for the requests of the model's project."""
    return await call.runtime.models.pressure(call.path["project"], call.path["name"])


async def train(call: Call) -> JobStatus:
    """Queue one step of reinforcement learning on groups of trajectories."""
    request = await call.job_body(TrainRequest)
    for term in request.config.terms:
        if isinstance(term, DistillConfig):
            call.own_model(term.teacher)
        if isinstance(term, CustomLossConfig):
            check_custom_loss(term, call.server.config)
    project, name, key_id = call.path["project"], call.path["name"], call.caller.key_id
    return await call.runtime.training.train(project, name, request, key_id=key_id)


async def train_sft(call: Call) -> JobStatus:
    """Queue supervised fine-tuning on the assistant messages of trajectories."""
    request = await call.job_body(TrainSFTRequest)
    project, name, key_id = call.path["project"], call.path["name"], call.caller.key_id
    return await call.runtime.training.train_sft(project, name, request, key_id=key_id)


async def missing_exchanges(call: Call) -> ExchangeIds:
    """Return those of some exchanges that are not recorded in the model's project, and so cannot be trained."""
    asked = await call.body(ExchangeIds)
    missing = await call.runtime.training.missing_exchanges(call.path["project"], asked.exchange_ids)
    return ExchangeIds(exchange_ids=missing)


async def log(call: Call) -> Logged:
    """Keep a row of a model's history and the groups that were logged with it, for the page."""
    request = await call.body(LogRequest)
    await call.runtime.run_logs.append(call.path["project"], call.path["name"], request)
    return Logged(num_groups=len(request.groups))


async def preflight(call: Call) -> PreflightReport:
    """Check what training this model needs; nothing is trained."""
    request = await call.body(PreflightRequest)
    return await call.runtime.training.preflight(call.path["project"], call.path["name"], request)


_MODEL = "/api/models/{project}/{name}"
ROUTES = [
    Route("POST", "/api/models", register, scope="train", request=RegisterRequest, response=ModelStatus),
    Route("GET", _MODEL, model_status, scope="infer", response=ModelStatus),
    Route("GET", f"{_MODEL}/pressure", pressure, scope="infer", response=EnginePressure),
    Route(
        "POST", f"{_MODEL}/train", train, scope="train", request=TrainRequest, response=JobStatus, status=202,
        training_data=True,
    ),
    Route(
        "POST", f"{_MODEL}/train_sft", train_sft, scope="train", request=TrainSFTRequest, response=JobStatus,
        status=202, training_data=True,
    ),
    Route(
        "POST", f"{_MODEL}/exchanges/missing", missing_exchanges, scope="train", request=ExchangeIds,
        response=ExchangeIds, training_data=True,
    ),
    Route(
        "POST", f"{_MODEL}/log", log, scope="train", request=LogRequest, response=Logged, training_data=True,
    ),
    Route(
        "POST", f"{_MODEL}/preflight", preflight, scope="train", request=PreflightRequest, response=PreflightReport,
        training_data=True,
    ),
]  # fmt: skip
