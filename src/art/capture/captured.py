"""`Captured`: the conversations of a capture, and the choice of the model whose answers it takes."""

from __future__ import annotations

import json
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx2

from art.capture.http import Exchange, read_exchange
from art.errors import ConfigError, NotFoundError
from art.messages import to_message
from art.trajectory import History, Trajectory


class AskedModel(Protocol):
    """Interface of a model that a request can be sent to."""

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


class CapturedModel(AskedModel, Protocol):
    """Interface of a model from which `art.capture` can make a trajectory."""

    def get_inference_name(self, step: int | None = None) -> str: ...

    def rollout_base_url(self, rollout_id: str) -> str: ...

    async def get_rollout(self, rollout_id: str) -> Trajectory: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
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

    def _read(self, model: AskedModel, asked: bytes, headers: httpx2.Headers, raw: bytes) -> None:
        """Add an answer. If it cannot be read, that is noted; the agent gets the same bytes and must not fail."""
        if self._is_over or not self._follows(model):
            return
        try:
            exchange = read_exchange(asked, headers, raw)
            add_exchange(self._histories, exchange)
        except Exception as error:
            why = f"an answer is not captured: {type(error).__name__}: {error}"
            self.trajectory.log(why)
            self._miss(why)
        else:
            self.trajectory.exchanges.chat_completions.append(exchange.chat)
            self._show(self._histories)

    def _takes(self, model: AskedModel) -> bool:
        """Whether answers of `model` belong to this capture. Without a given model, the first that is asked is chosen.

        A model that ART knows replaces an unknown endpoint: a rollout may ask another provider's model, for example to
        play the user, before it asks its policy.
        """
        if self._is_over:
            return False
        if self.model is None or (isinstance(self.model, Endpoint) and not isinstance(model, Endpoint)):
            self.model = model
            self._histories.clear()
            self.trajectory.messages_and_choices, self.trajectory.additional_histories = [], []
        mine = self.model
        if self._follows(model):
            return True
        self._miss(
            f"the model {model.name!r} at {model.inference_base_url} was asked, but the capture is of {mine.name!r} at "
            f"{mine.inference_base_url}; pass the model that the agent asks to `art.capture(model)`, or no model"
        )
        return False

    def _follows(self, model: AskedModel) -> bool:
        return all(getattr(self.model, key) == getattr(model, key) for key in ("project", "name", "inference_base_url"))

    def _miss(self, why: str) -> None:
        self._missed[why] = None


current: ContextVar[Captured | None] = ContextVar("art_capture", default=None)
"""The capture that surrounds the running code."""


_NOT_SENT_BACK = ("reasoning", "reasoning_content", "refusal", "annotations", "name")
"""Fields that clients leave out of an answer, or add to it, when they send it again."""


def add_exchange(histories: list[History], exchange: Exchange) -> None:
    """Append a request and its answers to the longest conversation that they continue, or begin one.

    Further choices of the same request, and branches, become conversations of their own. They repeat earlier answers as
    plain messages, so that no answer counts twice.
    """
    keys = [_key(message) for message in exchange.messages]
    for choice in exchange.choices:
        history = max(
            (history for history in histories if _continues(history, keys, exchange.tools)),
            key=lambda history: len(history.messages_and_choices),
            default=None,
        )
        if history is None:
            history = History(tools=exchange.tools)
            histories.append(history)
        history.messages_and_choices += exchange.messages[len(history.messages_and_choices) :]
        history.messages_and_choices.append(choice)


def _continues(history: History, keys: list[str], tools: list[dict[str, Any]] | None) -> bool:
    known = [_key(item) for item in history.messages_and_choices]
    return (history.tools or None) == (tools or None) and known == keys[: len(known)]


def _key(item: Any) -> str:
    """A key that is equal for an answer and for the message that clients make of it.

    Empty fields are left out, and the arguments of calls are compared as objects.
    """
    message = {key: value for key, value in to_message(item).items() if value and key not in _NOT_SENT_BACK}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    return json.dumps(message, sort_keys=True, default=str)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (LookupError, ValueError):  # another kind of tool, or arguments that are not JSON: compared as text
        return call
    return {"id": call.get("id"), "name": call["function"].get("name"), "arguments": arguments}
