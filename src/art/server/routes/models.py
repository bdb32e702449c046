"""Models: those that can be sampled from, in OpenAI's format (`/v1/models`); registering and training them. And
rollouts that other programs run under a base URL of their own.

Only keys with scope `admin` may register models with settings that touch the machine: folders of the server as base
models, devices, memory, addresses, and flags of programs. A key that may train must not run programs on the server.
A key of a project reads no folder of another project, and no folder elsewhere that the operator has not named. Losses
that are code need the operator's consent, whatever the key.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from art.config import CustomLossConfig, DistillConfig, ServerConfig, VllmConfig
from art.config.base_models import is_local, resolve_base_model
from art.errors import PermissionDeniedError
from art.protocol.answers import ModelCard, ModelList
from art.protocol.checkpoint_calls import Logged, LogRequest
from art.protocol.rollouts import RolloutPage, RolloutQuery, RolloutRecord, RolloutStatus, RolloutUpdate
from art.protocol.training import (
    ExchangeIds,
    JobStatus,
    ModelStatus,
    PreflightReport,
    PreflightRequest,
    RegisterRequest,
    TrainRequest,
    TrainSFTRequest,
)
from art.server.auth import Caller
from art.server.call import INFERENCE_BASES, ApiCall, Routes

_MODEL = "/api/models/{project}/{name}"
_ROLLOUT = "/api/rollouts/{rollout_id}"
_QUERY = {
    "project": str, "model": str, "group_id": str, "finished": bool, "trained": bool, "outcome": str, "since": int,
    "limit": int,
}  # fmt: skip
ROUTES = Routes()

HARMLESS = {
    "lora": None,
    "render": None,
    "sampling": None,
    "engine": {"kind", "dtype", "max_context"},
    "trainer": {"dtype", "max_tokens", "gradient_checkpointing", "quantization"},
}
"""Settings that any key may choose; `None` means all settings of a group. Others must have the server's values."""


def check_registration(request: RegisterRequest, caller: Caller, config: ServerConfig) -> None:
    """Check that a caller may register a model with these settings.

    Raises:
        PermissionDeniedError: the request touches the machine, and the key does not have scope `admin`.
        ConfigError: there is no base model of this name.
    """
    if caller.may("admin"):
        return
    offered = {resolve_base_model(name) for name in config.models}
    base_model = resolve_base_model(request.base_model)
    if base_model not in offered and (config.only_models or is_local(base_model)):
        listed = ", ".join(sorted(offered)) or "none"
        what, others = (
            ("is not one of them", "") if config.only_models else ("is a folder of the server", " and hub ids")
        )
        raise PermissionDeniedError(
            f"base model {request.base_model!r} {what}; without scope `admin` a key may use those that the server "
            f"offers ({listed}){others}; the operator can offer it: `art-server --model`",
            param="base_model",
        )
    for group, allowed in HARMLESS.items():
        settings = getattr(request.settings, group)
        if allowed is None:
            continue
        usual = VllmConfig() if isinstance(settings, VllmConfig) else getattr(config.settings, group)
        for name, field in type(settings).model_fields.items():
            value = getattr(settings, name)
            if name in allowed or value in (field.get_default(), getattr(usual, name, value)):
                continue
            raise PermissionDeniedError(
                f"`settings.{group}.{name}` touches the machine; it needs a key with scope `admin`, or leave it out",
                param=f"settings.{group}.{name}",
            )


def check_base_folder(folder: Path, caller: Caller, config: ServerConfig, data_dir: Path | None) -> None:
    """Check that a caller may have a model read from a folder of the server.

    The folder counts with `..` and symbolic links resolved. A key of a project may name the models of its project in
    the data directory; any admin key may name what is in `base_model_folders`, and one for all projects, where these
    are not set, every folder.

    Raises:
        PermissionDeniedError: the folder belongs to another project, or is not in one that the operator allows.
    """
    real = folder.expanduser().resolve()
    if any(real == Path(name).expanduser().resolve() for name in config.models if is_local(name)):
        return
    if data_dir is not None and real.is_relative_to(data_dir.resolve()):
        if caller.project is None or real.is_relative_to((data_dir / caller.project / "models").resolve()):
            return
        reason = f"is in the data directory and not in the folder of project {caller.project!r}"
    else:
        allowed = config.base_model_folders
        if allowed is None and caller.project is None:
            return
        if any(real.is_relative_to(Path(one).expanduser().resolve()) for one in allowed or ()):
            return
        reason = "is in no folder that this server takes base models from (`base_model_folders` of its configuration)"
    raise PermissionDeniedError(
        f"base model {str(folder)!r} {reason}; use a hub id, or a folder that the operator offers", param="base_model"
    )


def check_custom_loss(loss: CustomLossConfig, config: ServerConfig) -> None:
    """Check that the operator allows a custom loss, which runs code in the trainer's process. Raises
    `PermissionDeniedError` if its module is not among `config.custom_losses`."""
    module = loss.function.partition(":")[0]
    if not any(name == "*" or module == name or module.startswith(f"{name}.") for name in config.custom_losses):
        listed = ", ".join(config.custom_losses) or "none"
        raise PermissionDeniedError(
            f"the custom loss {loss.function!r} would run code on this server, which allows modules by name: {listed}. "
            f"Its operator can start it with `--custom-losses {module}`; `LocalBackend` allows every custom loss",
            param="config.loss",
        )


@ROUTES.add("GET", *(f"{base}/models" for base in INFERENCE_BASES), scope="infer")
async def list_models(call: ApiCall) -> ModelList:
    """The models that can be sampled from, and the untrained base models that can be."""
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
    return ModelList(data=[*cards, *promoted, *bases.values()])


# -- training --


@ROUTES.add("POST", "/api/models", scope="train")
async def register(call: ApiCall, request: RegisterRequest) -> ModelStatus:
    """Register a model, so that it can be sampled from and trained."""
    call.caller.check_project(request.project)
    check_registration(request, call.caller, call.server.config)

    def check_folder(folder: Path) -> None:
        check_base_folder(folder, call.caller, call.server.config, call.server.paths.data_dir)

    return await call.runtime.registration.register(request, check_folder)


@ROUTES.add("GET", _MODEL, scope="infer")
async def model_status(call: ApiCall) -> ModelStatus:
    """Return a model's status, with its newest step and its token counts."""
    return await call.runtime.models.status(*call.model)


@ROUTES.add("POST", f"{_MODEL}/train", scope="train", status=202, training_data=True)
async def train(call: ApiCall, request: TrainRequest) -> JobStatus:
    """Queue one step of reinforcement learning on groups of trajectories."""
    for term in request.config.terms:
        if isinstance(term, DistillConfig):
            call.own_model(term.teacher)
        if isinstance(term, CustomLossConfig):
            check_custom_loss(term, call.server.config)
    return await call.runtime.training.train(*call.model, request)


@ROUTES.add("POST", f"{_MODEL}/train_sft", scope="train", status=202, training_data=True)
async def train_sft(call: ApiCall, request: TrainSFTRequest) -> JobStatus:
    """Queue supervised fine-tuning on the assistant messages of trajectories."""
    return await call.runtime.training.train_sft(*call.model, request)


@ROUTES.add("POST", f"{_MODEL}/exchanges/missing", scope="train", training_data=True)
async def missing_exchanges(call: ApiCall, request: ExchangeIds) -> ExchangeIds:
    """Return those of some exchanges that are not recorded in the model's project, and so cannot be trained."""
    missing = await call.runtime.training.missing_exchanges(call.path["project"], request.exchange_ids)
    return ExchangeIds(exchange_ids=missing)


@ROUTES.add("POST", f"{_MODEL}/log", scope="train", training_data=True)
async def log(call: ApiCall, request: LogRequest) -> Logged:
    """Keep a row of a model's history and the groups that were logged with it, for the page."""
    await call.runtime.checkpoints.append_log(*call.model, request)
    return Logged(num_groups=len(request.groups))


@ROUTES.add("POST", f"{_MODEL}/preflight", scope="train", training_data=True)
async def preflight(call: ApiCall, request: PreflightRequest) -> PreflightReport:
    """Check what training this model needs; nothing is trained."""
    return await call.runtime.training.preflight(*call.model, request)


# -- rollouts of other programs --


@ROUTES.add("GET", _ROLLOUT, scope="infer", query={"project": str})
async def get_rollout(call: ApiCall) -> RolloutRecord:
    """Return the outcome of a rollout, and the conversations recorded under its base URL."""
    return await call.runtime.gateway.rollouts.get(call.path["rollout_id"], _project(call, call.query("project")))


@ROUTES.add("PUT", _ROLLOUT, scope="train")
async def put_rollout(call: ApiCall, request: RolloutUpdate) -> RolloutStatus:
    """Set the group, reward or outcome of a rollout."""
    for project in (request.project, request.model and request.model.partition("/")[0]):
        _project(call, project)
    return await call.runtime.gateway.rollouts.put(call.path["rollout_id"], request, call.caller.project)


@ROUTES.add("GET", "/api/rollouts", scope="infer", query=_QUERY)
async def list_rollouts(call: ApiCall) -> RolloutPage:
    """List rollouts in the order of their last change."""
    values: dict[str, Any] = {name: call.query(name) for name in RolloutQuery.model_fields}
    values["project"] = _project(call, values["project"])
    query = RolloutQuery.model_validate({name: value for name, value in values.items() if value is not None})
    return await call.runtime.gateway.rollouts.page(query)


def _project(call: ApiCall, asked: str | None) -> str | None:
    """The project that the request names, or the only project of the key. Raises `PermissionDeniedError` if the request
    names another project than the key's."""
    if asked is not None:
        call.caller.check_project(asked)
    return asked or call.caller.project
