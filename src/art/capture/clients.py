"""What a capture does with a request to a model and with its answer, whichever client sends it.

The clients of `model.openai_client()` have hooks that say whose they are. For any other client (`foreign.py`) the model
is found by the address and the name that it asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakSet, WeakValueDictionary

import httpx2

from art.capture.captured import AskedModel, Captured, CapturedModel, Endpoint, current
from art.capture.http import keep, keep_async

_CHAT = "/chat/completions"
_DIALECTS = (_CHAT, "/responses", "/messages")
"""How the addresses end at which a model is asked."""
_registered: WeakValueDictionary[tuple[str, str], CapturedModel] = WeakValueDictionary()
"""Trainable models by base URL and inference name."""
_own_hooks: WeakSet[Callable[..., Any]] = WeakSet()


def remember(model: CapturedModel) -> None:
    """Recognise a registered model when a client of somebody else's asks it."""
    _registered[model.inference_base_url or "", model.get_inference_name()] = model


def async_hooks(model: CapturedModel) -> dict[str, list[Callable[..., Any]]]:
    """Event hooks of the HTTP client through which `model` is asked."""

    async def on_request(request: httpx2.Request) -> None:
        redirect(model, request)

    async def on_response(response: httpx2.Response) -> None:
        if (read := reader(model, response)) is not None:
            keep_async(response, read)

    _own_hooks.add(on_request)
    return {"request": [on_request], "response": [on_response]}


def sync_hooks(model: CapturedModel) -> dict[str, list[Callable[..., Any]]]:
    """Event hooks of an HTTP client that blocks."""

    def on_request(request: httpx2.Request) -> None:
        redirect(model, request)

    def on_response(response: httpx2.Response) -> None:
        if (read := reader(model, response)) is not None:
            keep(response, read)

    _own_hooks.add(on_request)
    return {"request": [on_request], "response": [on_response]}


def see(client: Any, request: Any) -> AskedModel | None:
    """The model that a foreign client asks inside of a capture; the request is sent where that model is recorded.

    `None` if there is nothing to do: no capture, no request to a model, or one that something else takes care of.
    """
    captured = current.get()
    if captured is None or any(hook in _own_hooks for hook in client.event_hooks["request"]):
        return None
    if captured._is_on_server and str(request.url).startswith(captured.base_url.removesuffix("v1")):
        return None  # it was given `captured.base_url`
    model = _asked_model(captured, request)
    if model is not None:
        redirect(model, request)
    return model


def _asked_model(captured: Captured, request: Any) -> AskedModel | None:
    if request.method != "POST" or not request.url.path.endswith(_DIALECTS):
        return None
    try:
        asked = json.loads(request.content)["model"]
    except (RuntimeError, ValueError, LookupError, TypeError):  # a body that is streamed, or no request to a model
        return None
    if not isinstance(asked, str):
        return None
    url, given = str(request.url), captured.model
    if given is not None and _is_at(given, url) and _is_named(given, asked):
        return cast("AskedModel", given)
    known = [model for ref in _registered.valuerefs() if (model := ref()) is not None]
    meant = [model for model in known if _is_at(model, url) and _is_named(model, asked)]
    if len(meant) == 1:  # several have the same short name: the key tells the server which is meant
        return meant[0]
    path_end = next(end for end in _DIALECTS if request.url.path.endswith(end))
    return Endpoint(url.rpartition(path_end)[0], asked)


def _is_at(model: AskedModel, url: str) -> bool:
    return url.startswith(_bases(model))


def _bases(model: AskedModel) -> tuple[str, ...]:
    """Where a model is asked: its base URL, and for a registered one also the server's, which names no project."""
    own = str(httpx2.URL(model.inference_base_url or "")).rstrip("/") + "/"
    return (own, own.replace(f"/projects/{model.project}/v1/", "/v1/")) if model.trainable else (own,)


def _is_named(model: Any, asked: str) -> bool:
    names = {model.name} if isinstance(model, Endpoint) else {model.name, model.get_inference_name()}
    return asked in names or (model.trainable and asked.partition("@")[0] in names)  # a step of it


def redirect(model: AskedModel, request: Any) -> None:
    """Send a request to the capture's rollout, if the model is served where rollouts are recorded."""
    captured = current.get()
    if captured is None or not model.trainable:
        return
    asked = str(request.url)
    base = next((base for base in _bases(model) if asked.startswith(base)), None)
    if base is not None and captured._takes(model):
        request.url = type(request.url)(f"{captured.base_url}/{asked.removeprefix(base)}")


def reader(model: AskedModel, response: Any) -> Callable[[bytes], None] | None:
    """What takes in the body of an answer, if it belongs to a capture that keeps the record itself."""
    captured = current.get()
    if captured is None:
        return None
    request = response.request
    if not response.is_success:
        captured._miss(f"{request.method} {request.url.copy_with(query=None)} was answered with {response.status_code}")
        return None
    if model.trainable or not captured._takes(model):
        return None
    if not request.url.path.endswith(_CHAT):
        captured._miss(
            f"{request.url.copy_with(query=None)} was asked, and of an endpoint other than a registered model's only "
            "chat completions are captured; let the agent ask those, or a registered model"
        )
        return None
    asked = request.content
    return lambda raw: captured._read(model, asked, response.headers, raw)
