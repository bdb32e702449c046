"""Models: those that can be sampled from, in OpenAI's format (`/v1/models`); registering and training them. And
rollouts that other programs run under a base URL of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from art.config import CustomLossConfig, DistillConfig
from art.errors import NotFoundError
from art.protocol.answers import EnginePressure, ModelCard, ModelList
from art.protocol.chat import short
from art.protocol.checkpoint_calls import Logged, LogRequest
from art.protocol.preflight import PreflightReport, PreflightRequest
from art.protocol.rollouts import RolloutPage, RolloutQuery, RolloutRecord, RolloutStatus, RolloutUpdate
from art.protocol.training import (
    ExchangeIds,
    JobStatus,
    ModelStatus,
    RegisterRequest,
    TrainRequest,
    TrainSFTRequest,
)
from art.server.call import INFERENCE_BASES, REST, Call, Route
from art.server.machine import check_base_folder, check_custom_loss, check_registration


async def list_models(call: Call) -> ModelList:
    """The models that can be sampled from, and the untrained base models that can be."""
    return ModelList(data=_cards(call))


async def get_model(call: Call) -> ModelCard:
    """One model that can be sampled from, by any name that a request for an answer may use."""
    asked = call.path[REST]
    name, _, step = call.own_model(asked).partition("@")
    cards = [card for card in _cards(call) if name in _names(card)]
    if cards and all(card.is_base_model for card in cards):
        cards = cards[:1]  # base models are the same in all projects
    if len(cards) != 1 or (step not in ("", "promoted") and not (step.isdecimal() and len(step) < 10)):
        names = ", ".join(card.id for card in cards) or "GET /v1/models lists them"
        raise NotFoundError(f"there is no model {short(asked)}, or several have this name: {names}", param="model")
    card = cards[0]
    if not step:
        return card.model_copy(update={"id": asked})
    project, _, own_name = name.rpartition("/")
    models, project = call.runtime.models, project or card.owned_by
    number = models.promoted_step(project, own_name) if step == "promoted" else int(step)
    models.folder(project, own_name, number)  # an error if there is none
    return card.model_copy(update={"id": asked, "step": number})


def _names(card: ModelCard) -> tuple[str, ...]:
    """The id of a model, the id with its project, and the id without."""
    return card.id, f"{card.owned_by}/{card.id}", card.id.partition("/")[2]


def _cards(call: Call) -> list[ModelCard]:
    models = [m for m in call.runtime.models.list_all() if call.caller.project in (None, m.project)]
    cards = [
        ModelCard(
            id=model.inference_name, created=int(model.created_at), owned_by=model.project, base_model=model.base_model,
            step=model.step,
        )
        for model in models
    ]  # fmt: skip
    promoted = [
        card.model_copy(update={"id": f"{card.id}@promoted", "step": model.promoted_step})
        for card, model in zip(cards, models, strict=True)
        if model.promoted_step is not None and model.serves_base  # else the engine holds one step at a time
    ]
    bases: dict[str, ModelCard] = {}
    for model in models:
        base = model.base_model
        if not model.serves_base or (call.caller.project is not None and os.path.isabs(base)):
            continue
        # A name without a project means the model of the key's or the URL's project, if there is one.
        name = base if call.caller.project or call.path.get("project") == model.project else f"{model.project}/{base}"
        card = ModelCard(id=name, created=int(model.created_at), owned_by=model.project, base_model=base, step=0)
        bases.setdefault(name, card)
    return [*cards, *promoted, *bases.values()]


# -- training --


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


# -- rollouts of other programs --


async def get_rollout(call: Call) -> RolloutRecord:
    """Return the outcome of a rollout, and the conversations recorded under its base URL."""
    return await call.runtime.gateway.rollouts.get(call.path["rollout_id"], _project(call, call.query("project")))


async def put_rollout(call: Call) -> RolloutStatus:
    """Set the group, reward or outcome of a rollout."""
    update = await call.body(RolloutUpdate)
    for project in (update.project, update.model and update.model.partition("/")[0]):
        _project(call, project)
    return await call.runtime.gateway.rollouts.put(call.path["rollout_id"], update, call.caller.project)


async def list_rollouts(call: Call) -> RolloutPage:
    """List rollouts in the order of their last change."""
    values: dict[str, Any] = {name: call.query(name) for name in RolloutQuery.model_fields}
    values["project"] = _project(call, values["project"])
    query = RolloutQuery.model_validate({name: value for name, value in values.items() if value is not None})
    return await call.runtime.gateway.rollouts.page(query)


def _project(call: Call, asked: str | None) -> str | None:
    """The project that the request names, or the only project of the key.

    Raises:
        PermissionDeniedError: the request names another project than the key's.
    """
    if asked is not None:
        call.caller.check_project(asked)
    return asked or call.caller.project


_MODEL = "/api/models/{project}/{name}"
_ROLLOUT = "/api/rollouts/{rollout_id}"
_QUERY = {
    "project": str, "model": str, "group_id": str, "finished": bool, "trained": bool, "outcome": str, "since": int,
    "limit": int,
}  # fmt: skip
ROUTES = [
    *(Route("GET", f"{base}/models", list_models, scope="infer", response=ModelList) for base in INFERENCE_BASES),
    *(
        Route("GET", f"{base}/models/{{{REST}}}", get_model, scope="infer", response=ModelCard)
        for base in INFERENCE_BASES
    ),
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
    Route("GET", "/api/rollouts", list_rollouts, scope="infer", response=RolloutPage, query=_QUERY),
    Route("GET", _ROLLOUT, get_rollout, scope="infer", response=RolloutRecord, query={"project": str}),
    Route("PUT", _ROLLOUT, put_rollout, scope="train", request=RolloutUpdate, response=RolloutStatus),
]  # fmt: skip
