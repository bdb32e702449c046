"""Code that asks a model through an OpenAI client becomes a trajectory, without keeping a record itself.

    async with art.capture(model) as captured:
        await agent(model.openai_client(), scenario)
    captured.trajectory.reward = 1.0

Nothing is patched. The client of `model.openai_client()` looks, at each request, whether a capture surrounds it:
- a trainable model's request goes to the base URL of a fresh rollout id, where the server records exact exchanges, and
  the trajectory is made from that record. Any other client, in any dialect, is captured when given `captured.base_url`;
- an answer of somebody else's endpoint is copied on its way to the client (chat completions only).

Captures in concurrent tasks do not see each other; of nested ones the innermost gets the request.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, overload

import httpx2

from art.capture.conversations import add_exchange
from art.capture.http import keep, keep_async, read_exchange
from art.errors import ConfigError, NotFoundError
from art.trajectory import History, Trajectory


class CapturedModel(Protocol):
    """What a capture asks of a model."""

    inference_base_url: str | None

    @property
    def name(self) -> str: ...

    @property
    def project(self) -> str: ...

    @property
    def trainable(self) -> bool: ...

    def rollout_base_url(self, rollout_id: str) -> str: ...

    async def get_rollout(self, rollout_id: str) -> Trajectory: ...


@dataclass(slots=True, eq=False)
class Captured:
    """What was said inside of a capture."""

    model: Any = None
    """Whose answers are captured; unless given, the first model that is asked."""
    trajectory: Trajectory = field(default_factory=Trajectory)
    """Its conversations are complete when the block ends. Reward, metrics and logs can be set before."""
    rollout_id: str = field(default_factory=lambda: f"capture-{uuid.uuid4().hex}")
    _histories: list[History] = field(default_factory=list)
    """Conversations with an endpoint that keeps no record."""
    _is_on_server: bool = False
    _is_over: bool = False

    @property
    def base_url(self) -> str:
        """Where any client, in any dialect, is captured. The key is `model.inference_api_key`.

        Raises:
            ConfigError: no model is given, or it is not trainable: other endpoints keep no record.
        """
        if self.model is None or not self.model.trainable:
            whose = "without a model" if self.model is None else f"of {self.model.name!r}, which is not trainable,"
            raise ConfigError(
                f"a capture {whose} has no base URL: use `art.capture(model)` with a trainable model, "
                "or let the agent ask through `model.openai_client()`"
            )
        self._is_on_server = True
        return str(self.model.rollout_base_url(self.rollout_id))

    async def refresh(self) -> Trajectory:
        """`trajectory` with what was said so far. The end of the block does the same."""
        if self._is_on_server:
            try:
                recorded = await self.model.get_rollout(self.rollout_id)
            except NotFoundError:  # the base URL was given out, and nobody has asked there
                return self.trajectory
            self.trajectory.initial_policy_version = recorded.initial_policy_version
            self.trajectory.final_policy_version = recorded.final_policy_version
            self.trajectory.metadata["rollout_id"] = self.rollout_id
            self._show([recorded, *recorded.additional_histories])
        return self.trajectory

    def _show(self, histories: list[History]) -> None:
        """Make the longest conversation the trajectory's main one."""
        main = max(histories, key=lambda history: len(history.messages_and_choices))
        self.trajectory.messages_and_choices = list(main.messages_and_choices)
        self.trajectory.tools = main.tools
        self.trajectory.additional_histories = [
            History(messages_and_choices=history.messages_and_choices, tools=history.tools)
            for history in histories
            if history is not main
        ]

    def _read(self, asked: bytes, headers: httpx2.Headers, raw: bytes) -> None:
        """Take in an answer. One that cannot be read is no reason for the agent, who gets the same bytes, to fail."""
        if self._is_over:
            return
        try:
            add_exchange(self._histories, read_exchange(asked, headers, raw))
        except Exception as error:
            self.trajectory.log(f"an answer is not captured: {type(error).__name__}: {error}")
        else:
            self._show(self._histories)

    def _takes(self, model: CapturedModel) -> bool:
        if self._is_over:
            return False
        if self.model is None:
            self.model = model
        mine = self.model
        return (mine.project, mine.name, mine.inference_base_url) == (
            model.project, model.name, model.inference_base_url,
        )  # fmt: skip


_current: ContextVar[Captured | None] = ContextVar("art_capture", default=None)
_yielded: ContextVar[list[Trajectory] | None] = ContextVar("art_yielded_trajectory", default=None)


@asynccontextmanager
async def capture(model: CapturedModel | None = None) -> AsyncIterator[Captured]:
    """Make a trajectory of what is said to `model` inside; without one, to the first model that is asked.

    When the block raises, nothing is fetched from the server, and the error goes on.
    """
    captured = Captured(model)
    token = _current.set(captured)
    try:
        yield captured
        await captured.refresh()
        captured.trajectory.finish()
    finally:
        captured._is_over = True
        _current.reset(token)


def current_capture() -> Captured | None:
    """The capture that surrounds the caller."""
    return _current.get()


@overload
def auto_trajectory(*, required: Literal[True]) -> Trajectory: ...
@overload
def auto_trajectory(*, required: bool = False) -> Trajectory | None: ...
def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """The trajectory of the surrounding capture, to give it a reward.

    Raises:
        RuntimeError: there is none, and it is `required`.
    """
    if (captured := _current.get()) is not None:
        return captured.trajectory
    if required:
        raise RuntimeError("no capture surrounds this: run it in `await art.capture_auto_trajectory(...)`")
    return None


async def capture_auto_trajectory(awaitable: Awaitable[Any], *, model: CapturedModel | None = None) -> Trajectory:
    """Run a rollout that keeps no record and give its trajectory; see `capture` for `model`."""
    async with capture(model) as captured:
        await awaitable
    return captured.trajectory


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hand a trajectory to the surrounding `capture_yielded_trajectory`; of several the last counts.

    Raises:
        RuntimeError: nothing surrounds this that would take it.
    """
    if (taken := _yielded.get()) is None:
        raise RuntimeError("nobody takes this trajectory: run this in `await art.capture_yielded_trajectory(...)`")
    taken.append(trajectory)


async def capture_yielded_trajectory(awaitable: Awaitable[Any]) -> Trajectory:
    """Run a rollout that returns something else, and give the trajectory that it yielded.

    Raises:
        RuntimeError: it has yielded none.
    """
    taken: list[Trajectory] = []
    token = _yielded.set(taken)
    try:
        await awaitable
    finally:
        _yielded.reset(token)
    if not taken:
        raise RuntimeError("the rollout has yielded no trajectory: it must call `art.yield_trajectory(trajectory)`")
    return taken[-1]


def async_hooks(model: CapturedModel) -> dict[str, list[Callable[..., Any]]]:
    """Event hooks of the HTTP client through which `model` is asked."""

    async def on_request(request: httpx2.Request) -> None:
        _redirect(model, request)

    async def on_response(response: httpx2.Response) -> None:
        if (read := _reader(model, response)) is not None:
            keep_async(response, read)

    return {"request": [on_request], "response": [on_response]}


def sync_hooks(model: CapturedModel) -> dict[str, list[Callable[..., Any]]]:
    """The same for a client that blocks."""

    def on_response(response: httpx2.Response) -> None:
        if (read := _reader(model, response)) is not None:
            keep(response, read)

    return {"request": [lambda request: _redirect(model, request)], "response": [on_response]}


def _redirect(model: CapturedModel, request: httpx2.Request) -> None:
    """Send a request to the capture's rollout, if the model is served where rollouts are recorded."""
    captured = _current.get()
    if captured is None or not model.trainable:
        return
    plain, asked = f"{httpx2.URL(model.inference_base_url or '')}/", str(request.url)
    if asked.startswith(plain) and captured._takes(model):
        request.url = type(request.url)(f"{captured.base_url}/{asked.removeprefix(plain)}")


def _reader(model: CapturedModel, response: httpx2.Response) -> Callable[[bytes], None] | None:
    """What takes in the body of an answer, if it belongs to a capture that keeps the record itself."""
    captured = _current.get()
    if captured is None or model.trainable or not response.is_success or not captured._takes(model):
        return None
    if not response.request.url.path.endswith("/chat/completions"):
        return None
    asked = response.request.content
    return lambda raw: captured._read(asked, response.headers, raw)
