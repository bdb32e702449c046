"""Handles requests to models, and their answers, inside a capture.

The clients of `model.openai_client()` have hooks that know their model. For any other client (`foreign.py`) the model
is found by the address and the model name of the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, cast
from weakref import WeakSet, WeakValueDictionary

import httpx2

from art.capture.captured import AskedModel, Captured, CapturedModel, Endpoint, current
from art.capture.http import keep
from art.client.rollout_context import request_headers

_CHAT = "/chat/completions"
_DIALECTS = (_CHAT, "/completions", "/responses", "/messages")
"""Ends of the addresses at which models are asked."""
_registered: WeakValueDictionary[tuple[str, str], CapturedModel] = WeakValueDictionary()
"""Trainable models by base URL and inference name."""
_own_hooks: WeakSet[Callable[..., Any]] = WeakSet()
_RETRIES = "x-stainless-retry-count"
_sent_headers: ContextVar[dict[str, str] | None] = ContextVar("art_sent_headers", default=None)
"""Headers of the last request of the running task, for its repetitions."""


def remember(model: CapturedModel) -> None:
    """Remember a registered model, to recognise requests of other libraries' clients to it."""
    _registered[model.inference_base_url or "", _name_of(model)] = model


def async_hooks(model: CapturedModel) -> dict[str, list[Callable[..., Any]]]:
    """Make the event hooks of an asynchronous HTTP client that let a capture see its requests to `model`."""

    async def on_request(request: httpx2.Request) -> None:
        redirect(model, request)

    async def on_response(response: httpx2.Response) -> None:
        copy_answer(model, response)

    return _hooks(on_request, on_response)


def is_capturing() -> bool:
    """Whether the hooks do something now: a capture surrounds the caller."""
    return current.get() is not None


def sync_hooks(model: CapturedModel) -> dict[str, list[Callable[..., Any]]]:
    """Make the event hooks of a blocking HTTP client that let a capture see its requests to `model`."""
    return _hooks(partial(redirect, model), partial(copy_answer, model))


def _hooks(on_request: Callable[..., Any], on_response: Callable[..., Any]) -> dict[str, list[Callable[..., Any]]]:
    _own_hooks.add(on_request)
    return {"request": [on_request], "response": [on_response]}


def see(client: Any, request: Any) -> AskedModel | None:
    """Find the model that another library's client asks inside a capture, and redirect the request to be recorded.

    Returns `None` without a capture, for a request that asks no model, and for one that is captured otherwise.
    """
    captured = current.get()
    if captured is None or any(hook in _own_hooks for hook in client.event_hooks["request"]):
        return None
    if captured._is_on_server and str(request.url).startswith(captured.base_url.removesuffix("v1")):
        return None  # its client uses `captured.base_url`
    model = _asked_model(captured, request)
    if model is not None:
        prepare(model, request)
    return model


def _asked_model(captured: Captured, request: Any) -> AskedModel | None:
    if request.method != "POST" or not request.url.path.endswith(_DIALECTS):
        return None
    try:
        asked = json.loads(request.content)["model"]
    except (RuntimeError, ValueError, LookupError, TypeError):  # a streamed body, or not a request to a model
        return None
    if not isinstance(asked, str):
        return None
    url, mine = str(request.url), captured.model
    if mine is not None and url.startswith(_bases(mine)) and _is_named(mine, asked):
        return cast("AskedModel", mine)
    known = [model for ref in _registered.valuerefs() if (model := ref()) is not None]
    meant = [model for model in known if url.startswith(_bases(model)) and _is_named(model, asked)]
    if len(meant) == 1:  # if several have the same short name, the server chooses by the key
        return meant[0]
    path_end = next(end for end in _DIALECTS if request.url.path.endswith(end))
    return Endpoint(url.rpartition(path_end)[0], asked)


def _bases(model: AskedModel) -> tuple[str, ...]:
    """Addresses of a model: its base URL, and for a registered model also the server's, which names no project."""
    own = str(httpx2.URL(model.inference_base_url or "")).rstrip("/") + "/"
    return (own, own.replace(f"/projects/{model.project}/v1/", "/v1/")) if model.trainable else (own,)


def _is_named(model: Any, asked: str) -> bool:
    names = {model.name} if isinstance(model, Endpoint) else {model.name, _name_of(model)}
    return asked in names or (model.trainable and without_step(asked) in names)


def prepare(model: AskedModel, request: Any) -> None:
    """Make a request of another library's client to `model` ready to be sent: with the headers of its rollout, and to
    the capture's base URL. The model's own clients add those headers themselves.

    A repetition of a request has the headers of the request. OpenAI's client, which counts its retries in a header,
    makes them in the task of the request.
    """
    is_repeated = request.headers.get(_RETRIES, "0") != "0"
    headers = _sent_headers.get() if is_repeated else None
    if headers is None:
        headers = request_headers(f"{model.project}/{model.name}") if model.trainable else {}
        _sent_headers.set(headers)
    for name, value in headers.items():
        request.headers.setdefault(name, value)
    redirect(model, request)


def without_step(name: str) -> str:
    """Return an inference name without the step that a rollout may be bound to: `project/name@3`, `.../name:step3`."""
    return re.sub(r"(@[^@]*|:step\d+)$", "", name)


def _name_of(model: CapturedModel) -> str:
    return without_step(model.get_inference_name())


def redirect(model: AskedModel, request: Any) -> None:
    """Send a request to the capture's base URL instead, where the server of a trainable model records it."""
    captured = current.get()
    if captured is None or captured._copies or not model.is_recorded:
        return
    asked = str(request.url)
    base = next((base for base in _bases(model) if asked.startswith(base)), None)
    if base is not None and captured._takes(model):
        request.url = type(request.url)(f"{captured.base_url}/{asked.removeprefix(base)}")


def copy_answer(model: AskedModel, response: Any) -> None:
    """Copy an answer into the open capture on its way to the client, unless the server's record is read later."""
    captured = current.get()
    if captured is None:
        return
    request = response.request
    url = request.url.copy_with(query=None)
    if not response.is_success:
        captured._miss(f"{request.method} {url} was answered with {response.status_code}")
    elif (model.is_recorded and not captured._copies) or not captured._takes(model):
        return
    elif not request.url.path.endswith(_CHAT):
        captured._miss(
            f"{url} was asked. Without a registered model, and in `with art.Trajectory()`, only chat completions are "
            "captured; let the agent ask those, or use `async with art.capture(model)`"
        )
    else:
        asked = request.content
        keep(response, lambda raw: captured._read(model, asked, response.headers, raw))
