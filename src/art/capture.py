"""`art.capture` makes a trajectory of the requests that code sends to a model.

    async with art.capture(model) as captured:
        await agent(model.openai_client(), scenario)
    captured.trajectory.reward = 1.0

Requests of any client that is built on httpx are captured: `model.openai_client()`, the user's own OpenAI client,
litellm and others.
- A request to a trainable model is sent to the base URL of a new rollout id. The server records exact exchanges there,
  and the trajectory is made from them. Any other client, in any dialect, is captured if it uses `captured.base_url`.
- An answer of another endpoint is copied on its way to the client (chat completions only).
A capture that is empty logs the reason.

Captures in concurrent tasks are independent. In nested captures the innermost gets the request.

`with art.Trajectory() as trajectory:` captures chat completions into a trajectory without asking the server: answers
are copied on their way to the client, with the ids by which training finds their tokens.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import re
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload
from weakref import WeakSet, WeakValueDictionary

from art.client.rollout_context import request_headers
from art.errors import ConfigError, NotFoundError
from art.messages import join_stream, load_choice, message_key
from art.trajectory import History, Trajectory, capture_with

if TYPE_CHECKING:
    import httpx2  # imported when a model is asked

logger = logging.getLogger(__name__)


class CapturedModel(Protocol):
    """Interface of a model from which `art.capture` can make a trajectory."""

    @property
    def inference_base_url(self) -> str | None: ...

    @property
    def name(self) -> str: ...

    @property
    def project(self) -> str: ...

    @property
    def trainable(self) -> bool: ...

    @property
    def is_recorded(self) -> bool:
        """Whether its server keeps the exact tokens of its answers."""
        ...

    def get_inference_name(self, step: int | None = None) -> str: ...

    def rollout_base_url(self, rollout_id: str) -> str: ...

    async def get_rollout(self, rollout_id: str) -> Trajectory: ...


@dataclass(frozen=True, slots=True)
class UnknownModel:
    """A model that another library's client asks, and for which no `art.Model` is known."""

    inference_base_url: str
    name: str
    project: str = ""
    trainable: bool = False
    is_recorded: bool = False


@dataclass(slots=True, eq=False)
class Captured:
    """Result of `art.capture`: a trajectory of the requests that were sent to a model inside its block."""

    model: Any = None
    """Model whose answers are captured; by default the first model that is asked."""
    trajectory: Trajectory = field(default_factory=Trajectory)
    """Trajectory whose conversations are complete when the block ends. Reward and metrics can be set before."""
    rollout_id: str = field(default_factory=lambda: f"capture-{uuid.uuid4().hex}")
    """Id under which the server records the conversations."""
    _histories: list[History] = field(default_factory=list)
    """Conversations with an endpoint that keeps no record."""
    _missed: dict[str, None] = field(default_factory=dict)
    """Reasons why requests were not captured, each once."""
    _copies: bool = False
    """Whether answers are copied on their way to the client, also those of a model whose server records them."""
    _is_on_server: bool = False
    _is_over: bool = False

    @property
    def base_url(self) -> str:
        """Base URL at which requests of any client are captured, in OpenAI's or Anthropic's format.

        Its API key is `model.inference_api_key`.

        Raises:
            ConfigError: the capture has no trainable model; other endpoints keep no record.
        """
        if self.model is None or not self.model.is_recorded:
            lacks = "which no ART server records" if self.model and self.model.trainable else "which is not trainable"
            whose = "without a model" if self.model is None else f"of {self.model.name!r}, {lacks},"
            raise ConfigError(
                f"a capture {whose} has no base URL: use `art.capture(model)` with a trainable model, "
                "or let the agent ask through `model.openai_client()`"
            )
        self._is_on_server = True
        return str(self.model.rollout_base_url(self.rollout_id))

    async def refresh(self) -> Trajectory:
        """Update `trajectory` with the conversations so far, and return it. The end of the block does the same."""
        if self._is_on_server:
            try:
                recorded = await self.model.get_rollout(self.rollout_id)
            except NotFoundError:  # the base URL was read, but no request came
                return self.trajectory
            self.trajectory.initial_policy_version = recorded.initial_policy_version
            self.trajectory.final_policy_version = recorded.final_policy_version
            self.trajectory.metadata["rollout_id"] = self.rollout_id
            self._show([recorded, *recorded.additional_histories])
        return self.trajectory

    def why_empty(self) -> str | None:
        """Return why nothing was captured and what to do about it; `None` if something was captured."""
        if self.trajectory.messages_and_choices:
            return None
        if self._missed:
            return f"the capture is empty: {'; '.join(self._missed)}"
        return (
            "the capture is empty: no request to a model was seen inside it. Clients that are built on httpx are seen "
            "(openai, litellm and others). The libraries requests, aiohttp and urllib, other processes, and threads "
            "that do not carry the context are not seen (`asyncio.to_thread` carries it). Let the agent ask through "
            "`model.openai_client()`, or use `async with art.capture(model) as captured` and give its client "
            "`captured.base_url`"
        )

    def _show(self, histories: list[History]) -> None:
        """Put the longest conversation into the trajectory, and the others into its `additional_histories`."""
        main = max(histories, key=lambda history: len(history.messages_and_choices))
        self.trajectory.messages_and_choices = list(main.messages_and_choices)
        self.trajectory.tools = main.tools
        self.trajectory.additional_histories = [
            History(messages_and_choices=history.messages_and_choices, tools=history.tools)
            for history in histories
            if history is not main
        ]

    def _read(self, model: AnyModel, asked: bytes, headers: httpx2.Headers, raw: bytes) -> None:
        """Add an answer. If it cannot be read, that is noted; the agent gets the same bytes and must not fail."""
        if self._is_over or not self._follows(model):
            return
        try:
            add_exchange(self._histories, json.loads(asked), read_completion(headers, raw))
        except Exception as error:
            why = f"an answer is not captured: {type(error).__name__}: {error}"
            self.trajectory.log(why)
            self._missed[why] = None
        else:
            self._show(self._histories)

    def _takes(self, model: AnyModel) -> bool:
        """Whether answers of `model` belong to this capture. Without a given model, the first that is asked is chosen.

        A model that ART knows replaces an unknown one: a rollout may ask another provider's model, for example to play
        the user, before it asks its policy.
        """
        if self._is_over:
            return False
        if self.model is None or (isinstance(self.model, UnknownModel) and not isinstance(model, UnknownModel)):
            self.model = model
            self._histories.clear()
            self.trajectory.messages_and_choices, self.trajectory.additional_histories = [], []
        if self._follows(model):
            return True
        why = (
            f"the model {model.name!r} at {model.inference_base_url} was asked, but the capture is of "
            f"{self.model.name!r} at {self.model.inference_base_url}; pass the model that the agent asks to "
            "`art.capture(model)`, or no model"
        )
        self._missed[why] = None
        return False

    def _follows(self, model: AnyModel) -> bool:
        return all(getattr(self.model, key) == getattr(model, key) for key in ("project", "name", "inference_base_url"))


AnyModel = CapturedModel | UnknownModel
current: ContextVar[Captured | None] = ContextVar("art_capture", default=None)
"""The capture that surrounds the running code."""


@contextmanager
def _inside(captured: Captured | None) -> Iterator[None]:
    """Context manager: requests of the body belong to this capture; with `None` to none."""
    token = current.set(captured)
    try:
        if captured is None:
            yield
        else:
            with watch_clients():
                yield
    finally:
        current.reset(token)
        if captured is not None:
            captured._is_over = True


@asynccontextmanager
async def capture(model: CapturedModel | None = None) -> AsyncIterator[Captured]:
    """Make a trajectory of the conversations with `model` inside the block; by default with the first model asked.

    If the block raises, nothing is fetched from the server and the error is raised. If nothing was captured, a warning
    says why.
    """
    captured = Captured(model)
    with _inside(captured):
        yield captured
    await captured.refresh()
    captured.trajectory.finish()
    if (why := captured.why_empty()) is not None:
        captured.trajectory.log(why)
        logger.warning("%s", why)


@contextmanager
def _copy_into(trajectory: Trajectory) -> Iterator[None]:
    """Context manager: copy answers that code inside receives into a trajectory; see `Trajectory.__enter__`."""
    with _inside(Captured(trajectory=trajectory, _copies=True)):
        yield
    trajectory.finish()


capture_with(_copy_into)


@contextmanager
def no_capture() -> Iterator[None]:
    """Context manager: requests inside it are not captured, for example those of a judge within a rollout."""
    with _inside(None):
        yield


def current_capture() -> Captured | None:
    """Return the capture that surrounds the caller; `None` if there is none."""
    return current.get()


@overload
def auto_trajectory(*, required: Literal[True]) -> Trajectory: ...
@overload
def auto_trajectory(*, required: bool = False) -> Trajectory | None: ...
def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """Return the trajectory of the surrounding capture, for example to set its reward; `None` without a capture.

    Raises:
        RuntimeError: no capture surrounds the caller, and one is `required`.
    """
    if (captured := current.get()) is not None:
        return captured.trajectory
    if required:
        raise RuntimeError("no capture surrounds this call: run it in `await art.capture_auto_trajectory(...)`")
    return None


current_trajectory = auto_trajectory


async def capture_auto_trajectory(awaitable: Awaitable[Any], *, model: CapturedModel | None = None) -> Trajectory:
    """Run a rollout that keeps no record, and return its trajectory; see `capture` for `model`."""
    async with capture(model) as captured:
        await awaitable
    return captured.trajectory


# -- requests of clients: whose they are, and where they go --

_CHAT = "/chat/completions"
_DIALECTS = (_CHAT, "/completions", "/responses", "/messages")
"""Ends of the addresses at which models are asked."""
_registered: WeakValueDictionary[tuple[str, str], CapturedModel] = WeakValueDictionary()
"""Trainable models by base URL and inference name."""
_own_hooks: WeakSet[Callable[..., Any]] = WeakSet()
"""Hooks of the clients of `model.openai_client()`, which know their model."""
_sent_headers: ContextVar[dict[str, str] | None] = ContextVar("art_sent_headers", default=None)
"""Headers of the last request of the running task, for its repetitions."""


def remember(model: CapturedModel) -> None:
    """Remember a registered model, to recognise requests of other libraries' clients to it."""
    _registered[model.inference_base_url or "", without_step(model.get_inference_name())] = model


def hooks_of(model: CapturedModel, *, blocking: bool) -> dict[str, list[Callable[..., Any]]]:
    """Make the event hooks of an HTTP client that let a capture see its requests to `model`."""

    async def on_request(request: httpx2.Request) -> None:
        redirect(model, request)

    async def on_response(response: httpx2.Response) -> None:
        copy_answer(model, response)

    hook: Callable[..., Any] = partial(redirect, model) if blocking else on_request
    _own_hooks.add(hook)
    return {"request": [hook], "response": [partial(copy_answer, model) if blocking else on_response]}


def without_step(name: str) -> str:
    """Return an inference name without the step that a rollout may be bound to: `project/name@3`, `.../name:step3`."""
    return re.sub(r"(@[^@]*|:step\d+)$", "", name)


def _bases(model: AnyModel) -> tuple[str, ...]:
    """Addresses of a model: its base URL, and for a registered model also the server's, which names no project."""
    import httpx2

    own = str(httpx2.URL(model.inference_base_url or "")).rstrip("/") + "/"
    return (own, own.replace(f"/projects/{model.project}/v1/", "/v1/")) if model.trainable else (own,)


def _is_meant(model: AnyModel, url: str, asked: str) -> bool:
    """Whether a request to `url` for the model name `asked` is one to `model`."""
    if not url.startswith(_bases(model)):
        return False
    names = {model.name}
    if not isinstance(model, UnknownModel):
        names.add(without_step(model.get_inference_name()))
    return asked in names or (model.trainable and without_step(asked) in names)


def see(client: Any, request: Any) -> AnyModel | None:
    """Find the model that another library's client asks inside a capture, and make the request ready to be sent.

    It gets the headers of its rollout, and goes to the capture's base URL. The model's own clients do both themselves.
    Returns `None` without a capture, for a request that asks no model, and for one that is captured otherwise.
    """
    captured = current.get()
    if captured is None or any(hook in _own_hooks for hook in client.event_hooks["request"]):
        return None
    url = str(request.url)
    if captured._is_on_server and url.startswith(captured.base_url.removesuffix("v1")):
        return None  # its client uses `captured.base_url`
    if request.method != "POST" or not request.url.path.endswith(_DIALECTS):
        return None
    try:
        asked = json.loads(request.content)["model"]
    except (RuntimeError, ValueError, LookupError, TypeError):  # a streamed body, or not a request to a model
        return None
    if not isinstance(asked, str):
        return None
    known = [one for ref in _registered.valuerefs() if (one := ref()) is not None]
    meant = [one for one in known if _is_meant(one, url, asked)]
    model: AnyModel
    if captured.model is not None and _is_meant(captured.model, url, asked):
        model = captured.model
    elif len(meant) == 1:  # if several have the same short name, the server chooses by the key
        model = meant[0]
    else:
        path_end = next(end for end in _DIALECTS if request.url.path.endswith(end))
        model = UnknownModel(url.rpartition(path_end)[0], asked)
    # A repetition has the headers of its request. OpenAI's client, which counts its retries in a header, makes them in
    # the task of the request.
    is_repeated = request.headers.get("x-stainless-retry-count", "0") != "0"
    headers = _sent_headers.get() if is_repeated else None
    if headers is None:
        headers = request_headers(f"{model.project}/{model.name}") if model.trainable else {}
        _sent_headers.set(headers)
    for name, value in headers.items():
        request.headers.setdefault(name, value)
    redirect(model, request)
    return model


def redirect(model: AnyModel, request: Any) -> None:
    """Send a request to the capture's base URL instead, where the server of a trainable model records it."""
    captured = current.get()
    if captured is None or captured._copies or not model.is_recorded:
        return
    asked = str(request.url)
    base = next((base for base in _bases(model) if asked.startswith(base)), None)
    if base is not None and captured._takes(model):
        request.url = type(request.url)(f"{captured.base_url}/{asked.removeprefix(base)}")


def copy_answer(model: AnyModel, response: Any) -> None:
    """Copy an answer into the open capture on its way to the client, unless the server's record is read later."""
    captured = current.get()
    if captured is None:
        return
    request = response.request
    url = request.url.copy_with(query=None)
    if not response.is_success:
        captured._missed[f"{request.method} {url} was answered with {response.status_code}"] = None
    elif (model.is_recorded and not captured._copies) or not captured._takes(model):
        return
    elif not request.url.path.endswith(_CHAT):
        why = (
            f"{url} was asked. Without a registered model, and in `with art.Trajectory()`, only chat completions are "
            "captured; let the agent ask those, or use `async with art.capture(model)`"
        )
        captured._missed[why] = None
    else:
        asked = request.content
        keep(response, lambda raw: captured._read(model, asked, response.headers, raw))


_lock = threading.Lock()
_num_open = 0
_replaced: list[tuple[type, Callable[..., Any], Callable[..., Any]]] = []
"""Each class with its own `send` and the function that replaces it."""
_is_seen: ContextVar[bool] = ContextVar("art_capture_is_seen", default=False)
"""Whether an outer `send`, which another program kept and wrapped, already handles this request."""


@contextmanager
def watch_clients() -> Iterator[None]:
    """Context manager: while it is open, every request of an httpx or httpx2 client in this process is seen.

    These libraries have no hook for a client that another program made. So this is the one place where a method of
    another library, `send`, is replaced: only while a capture is open, and without effect for code outside it. The
    reasons are in `docs/decisions/0008-clients-of-others-are-captured.md`.

    A request inside a capture is then captured. Blocks may overlap: the libraries are restored when the last one ends.
    """
    global _num_open
    with _lock:
        _num_open += 1
        for name in ("httpx", "httpx2") if _num_open == 1 else ():
            if importlib.util.find_spec(name) is not None:
                library = importlib.import_module(name)
                for client, watch in ((library.AsyncClient, _watch_async), (library.Client, _watch)):
                    watched = watch(client.send)
                    _replaced.append((client, client.send, watched))
                    client.send = watched
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            if not _num_open:
                for client, send, watched in _replaced:
                    # If another program wrapped it since, it stays and does nothing.
                    if client.__dict__.get("send") is watched:
                        client.send = send  # type: ignore[attr-defined]
                _replaced.clear()


def _watch_async(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    async def watched(client: Any, request: Any, *, stream: bool = False, **further: Any) -> Any:
        model = None if _is_seen.get() else see(client, request)
        if model is None:
            return await send(client, request, stream=stream, **further)
        token = _is_seen.set(True)
        try:
            response = await send(client, request, stream=True, **further)
        finally:
            _is_seen.reset(token)
        copy_answer(model, response)
        if not stream:
            try:
                await response.aread()
            except BaseException:
                await response.aclose()
                raise
        return response

    return watched


def _watch(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def watched(client: Any, request: Any, *, stream: bool = False, **further: Any) -> Any:
        model = None if _is_seen.get() else see(client, request)
        if model is None:
            return send(client, request, stream=stream, **further)
        token = _is_seen.set(True)
        try:
            response = send(client, request, stream=True, **further)
        finally:
            _is_seen.reset(token)
        copy_answer(model, response)
        if not stream:
            try:
                response.read()
            except BaseException:
                response.close()
                raise
        return response

    return watched


# -- answers on their way to the client --


def add_exchange(histories: list[History], request: dict[str, Any], completion: dict[str, Any]) -> None:
    """Append the messages of a request and its answers to the longest conversation that they continue, or begin one.

    Further choices of the same request, and branches, become conversations of their own. They repeat earlier answers as
    plain messages, so that no answer counts twice.
    """
    messages, tools = request["messages"], request.get("tools")
    choices = [load_choice(choice) for choice in completion["choices"]]
    keys = [message_key(message) for message in messages]
    for choice in choices:
        main = None
        for history in histories:
            known = [message_key(item) for item in history.messages_and_choices]
            continues = (history.tools or None) == (tools or None) and known == keys[: len(known)]
            if continues and (main is None or len(known) > len(main.messages_and_choices)):
                main = history
        if main is None:
            main = History(tools=tools)
            histories.append(main)
        main.messages_and_choices += messages[len(main.messages_and_choices) :]
        main.messages_and_choices.append(choice)


def read_completion(headers: httpx2.Headers, raw: bytes) -> dict[str, Any]:
    """Read a completion from the raw body of its answer, which may be compressed; a stream is joined to a whole one.

    Raises:
        ValueError: the body is no JSON, or the stream was closed before its end.
    """
    import httpx2

    answer = httpx2.Response(200, headers=headers, content=raw)
    is_stream = "text/event-stream" in headers.get("content-type", "")
    whole: dict[str, Any] = join_stream(answer.text) if is_stream else answer.json()
    return whole


def keep(response: Any, read: Callable[[bytes], None]) -> None:
    """Call `read` with the body of an answer when the answer ends or the client closes it."""
    stream_type: Any = type(response.stream)
    response.stream = _copy_type(stream_type)(response.stream, read)


@functools.cache
def _copy_type(stream_type: type) -> Callable[..., Any]:
    """Make `_Copy` a stream class of the response's library, httpx2 or httpx; each accepts only its own."""
    kinds = (kind for kind in stream_type.__mro__ if kind.__name__ in ("AsyncByteStream", "SyncByteStream"))
    return type("Copy", (_Copy, *kinds), {})


class _Copy:
    """A stream, of a client that blocks or one that does not, which keeps a copy of the body."""

    def __init__(self, stream: Any, read: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._read: Callable[[bytes], None] | None = read
        self._kept: list[bytes] = []

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._kept.append(piece)
            yield piece

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self._kept.append(piece)
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
        self._end()

    def close(self) -> None:
        self._stream.close()
        self._end()

    def _end(self) -> None:
        if self._read is not None:
            self._read(b"".join(self._kept))
            self._read = None
