"""`/v1/models`: the models that can be sampled from, in OpenAI's format. A promoted checkpoint is one of them."""

from __future__ import annotations

import os

from art.errors import NotFoundError
from art.protocol.answers import ModelCard, ModelList
from art.protocol.chat import short
from art.server.call import INFERENCE_BASES, REST, Call, Route


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


ROUTES = [
    route
    for base in INFERENCE_BASES
    for route in (
        Route("GET", f"{base}/models", list_models, scope="infer", response=ModelList),
        Route("GET", f"{base}/models/{{{REST}}}", get_model, scope="infer", response=ModelCard),
    )
]
