"""`/v1/models`: the models that can be sampled from, in OpenAI's format."""

from __future__ import annotations

from art.protocol.answers import ModelCard, ModelList
from art.server.call import INFERENCE_BASES, Call, Route


async def list_models(call: Call) -> ModelList:
    """List the models that can be sampled from."""
    models = call.runtime.models.list_all()
    cards = [
        ModelCard(id=model.inference_name, owned_by=model.project, base_model=model.base_model, step=model.step)
        for model in models
        if call.caller.project in (None, model.project)
    ]
    return ModelList(data=cards)


ROUTES = [Route("GET", f"{base}/models", list_models, scope="infer", response=ModelList) for base in INFERENCE_BASES]
