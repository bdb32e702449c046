"""A model whose answers come from a task's scripted player, in this process: no server, no network.

    model = ScriptedModel(task)
    trajectory = await model.play(scenario)          # the task's own `rollout`, with its best player
    assert trajectory.reward == 1.0

Code that runs rollouts by itself, such as a comparison of models, uses `playing`:

    with model.playing(scenario, rollout_index):
        trajectory = await task.rollout(model, scenario, rollout_index=rollout_index)
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from art.client.http import PerLoop
from art.model import Model
from art.task import Player, Scenario, Task
from art.testing.scripted_server import Reply, completion, failure
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

_ADDRESS = "http://scripted.invalid/v1"
"""Address of requests. They do not leave the process."""
_player: ContextVar[Player | None] = ContextVar("art_scripted_player", default=None)


class ScriptedModel(Model[Any, Any]):
    """A model that plays a task by `task.player`. Rollouts that run at once have players of their own."""

    task: Task
    """The task whose scripted player answers."""
    _by_loop: PerLoop[Any] = PrivateAttr(default_factory=lambda: PerLoop(lambda client: client.close()))

    def __init__(self, task: Task, *, name: str = "scripted", **fields: Any) -> None:
        """
        Args:
            fields: further fields of `Model`, e.g. `project`, which is the task's label by default.
        """
        fixed = {"inference_base_url": _ADDRESS, "inference_api_key": "scripted"}
        super().__init__(**{"name": name, "project": task.label, **fields, **fixed, "task": task})

    @contextlib.contextmanager
    def playing(self, scenario: Scenario, rollout_index: int = 0) -> Iterator[None]:
        """Let a new player of this rollout answer the requests of the body, and of the tasks that the body starts.

        Raises:
            ConfigError: the task has no scripted player.
        """
        token = _player.set(self.task.player(scenario, rollout_index=rollout_index))
        try:
            yield
        finally:
            _player.reset(token)

    async def play(self, scenario: Scenario, rollout_index: int = 0) -> Trajectory:
        """Run the task's rollout of a scenario with its scripted player."""
        with self.playing(scenario, rollout_index):
            return await self.task.rollout(self, scenario, rollout_index=rollout_index)

    def openai_client(self) -> AsyncOpenAI:
        """The client of the running event loop. Its requests are answered by the player of `playing`.

        Raises:
            RuntimeError: no event loop is running.
        """
        client: AsyncOpenAI = self._by_loop.get(self._make_client)
        return client

    def _make_client(self) -> AsyncOpenAI:
        import openai

        # OpenAI's package uses httpx or httpx2, by its version; the transport must come from the same one.
        http = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])

        async def answer(request: Any) -> Any:
            status, body = await _reply(request.url.path, json.loads(request.content))
            return http.Response(status, headers={"content-type": "application/json"}, content=_stream(body))

        client = openai.DefaultAsyncHttpxClient(
            transport=http.MockTransport(answer), event_hooks=self._hooks().by_event, trust_env=False
        )
        return openai.AsyncOpenAI(base_url=_ADDRESS, api_key="scripted", max_retries=0, http_client=client)

    async def close(self) -> None:
        await self._by_loop.close()
        await super().close()


async def _stream(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """The body as a stream, since a capture copies an answer while the client reads it."""
    yield json.dumps(body).encode()


async def _reply(path: str, body: dict[str, Any]) -> Reply:
    """Answer a request by the player of the running rollout. An error of the player is an answer with status 400."""
    player = _player.get()
    if player is None:
        return failure(400, "no scripted player is at work here: use `with model.playing(scenario)` or `model.play`")
    if not path.endswith("/chat/completions") or body.get("stream") or body.get("n", 1) != 1:
        return failure(400, "a scripted player answers chat completions with one choice, and does not stream")
    try:
        message = player(body["messages"], body.get("tools"))
        message = await message if inspect.isawaitable(message) else message
        return completion(body, _whole(message, len(body["messages"])))
    except Exception as error:
        logger.exception("the scripted player failed")
        return failure(400, f"the scripted player failed: {type(error).__name__}: {error}")


def _whole(message: dict[str, Any], turn: int) -> dict[str, Any]:
    """The message with what a player may leave out: ids and types of tool calls, and arguments as JSON."""
    calls = []
    for index, call in enumerate(message.get("tool_calls") or ()):
        arguments = call["function"].get("arguments", {})
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {**call["function"], "arguments": arguments}
        calls.append({"id": f"call-{turn}-{index}", "type": "function", **call, "function": function})
    return {"content": None, **message, "tool_calls": calls} if calls else message
