"""Use environments served by OpenEnv as tasks: an observation is a message, an action is a tool call.

    task = OpenEnvTask("http://127.0.0.1:8000")                        # art train openenv:http://127.0.0.1:8000
    trajectory = await task.rollout(model, task.scenarios("train", seed=0, count=1)[0])

An environment with tools (an `MCPEnvironment`) offers its tools to the model. Any other environment offers one tool,
`act`, whose parameters are the environment's action. Needs the extra `openenv` with openenv 0.10.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import httpx2
from pydantic import Field

from art.errors import ConfigError, ToolServerError
from art.task import Scenario, Split, TaskDefaults, TaskOptions, derive_seed, take_turn
from art.task.interface import PlacedTask
from art.trajectory import Trajectory

if TYPE_CHECKING:
    from art.model import Model

INSTALL = "pip install 'agent-reinforcement-trainer[openenv]'"
SYSTEM = "You act in an environment by calling tools. Each result is what you observe next."
ACT = "act"
_MAX_SEED = 2**31
"""Exclusive upper bound of seeds; common random generators take no larger ones."""
_BEGIN = "Begin."
"""First user message if the environment shows nothing at first."""
_CONNECT_TIMEOUT_S = 30.0


class OpenEnvOptions(TaskOptions):
    """Options of an environment of OpenEnv on the command line."""

    not_in_label: ClassVar[frozenset[str]] = frozenset({"max_sessions"})
    system_prompt: str = SYSTEM
    """System message of a rollout."""
    max_turns: int = Field(default=20, ge=1)
    """Largest number of answers of the model."""
    max_sessions: int = Field(default=8, ge=1)
    """Largest number of rollouts at once, at most the server's `max_concurrent_envs`."""


class OpenEnvTask(PlacedTask):
    """A task to train on: the model acts in an environment that OpenEnv serves.

    A scenario's seed and `inputs` are the arguments of the environment's `reset`, so all rollouts of a group begin in
    the same state. The reward is the sum over the steps. Override `scenarios` if the environment numbers its tasks.

    Metrics: `done`, `num_turns`, `num_actions`, `num_invalid_actions`. `metadata["ending"]` is `done`, `out_of_turns`,
    `no_action` (an answer without a call), `cut_short` (an answer was too long) or `context_full`. All but `done` are
    the policy's fault, and keep the reward so far.
    """

    name: ClassVar[str] = "openenv"
    description: ClassVar[str] = "an environment of OpenEnv"
    place_word: ClassVar[str] = "URL"
    place_help: ClassVar[str] = "an environment that OpenEnv serves"
    options_class = OpenEnvOptions
    options = OpenEnvOptions()
    defaults: ClassVar[TaskDefaults] = TaskDefaults(num_steps=100, num_minibatches=1, schedule="constant")

    def __init__(
        self,
        url: str,
        *,
        system_prompt: str = SYSTEM,
        max_turns: int = 20,
        max_sessions: int = 8,
        headers: Mapping[str, str] | None = None,
        request: Mapping[str, Any] | None = None,
        show: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        """
        Args:
            url: address of the environment's server.
            max_turns: largest number of answers of the model.
            max_sessions: largest number of concurrent rollouts. It must not exceed the server's `max_concurrent_envs`,
                which is 1 by default.
            headers: HTTP headers of the connection, e.g. for keys.
            request: further arguments of each request to the model: `max_completion_tokens`, ... The temperature is 1
                by default.
            show: converts an observation to text; by default its only text, or JSON.

        Raises:
            ConfigError: openenv is missing, or a limit is below 1.
        """
        if max_turns < 1 or max_sessions < 1:
            raise ConfigError(f"`max_turns` and `max_sessions` must be at least 1, got {max_turns} and {max_sessions}")
        self._client_class = _load_client()
        self._url, self._headers = url.rstrip("/"), dict(headers or {})
        self._system_prompt, self._max_turns, self._max_sessions = system_prompt, max_turns, max_sessions
        self._request = {"temperature": 1.0, **(request or {})}
        self._show = show or show_observation
        self._action: dict[str, Any] | None = None
        """JSON schema of an action, fetched by the first rollout."""
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def place_name(self) -> str:
        return self._url.partition("://")[2]

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        return [self.scenario(split, seed, index, {}) for index in range(count)]

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        """Run one episode. An invalid action does not raise; the model is told about it.

        Raises:
            ToolServerError: the environment does not answer, is full, or failed.
        """
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._max_sessions))
        async with gate, AsyncExitStack() as stack:
            env = self._client_class(self._url, headers=self._headers or None)
            await self._ask(stack.enter_async_context(env))
            first = await self._ask(env.reset(seed=scenario.seed % _MAX_SEED, **scenario.inputs))
            session = _Session(env=env, tools=await self._find_tools(env))
            trajectory = Trajectory(
                messages_and_choices=[
                    {"role": "system", "content": self._system_prompt},
                    {"role": "user", "content": self._show(first.observation) or _BEGIN},
                ],
                tools=list(session.tools.values()),
                reward=float(first.reward or 0.0),
                metadata={"scenario_id": scenario.id},
                metrics={"num_turns": 0, "num_actions": 0, "num_invalid_actions": 0},
            )  # fmt: skip
            ending = "done" if first.done else "out_of_turns"
            while ending == "out_of_turns" and trajectory.metrics["num_turns"] < self._max_turns:
                seed = derive_seed(scenario.seed, rollout_index, int(trajectory.metrics["num_turns"]))
                ending = await self._turn(model, step, seed, trajectory, session) or ending
        trajectory.metrics["done"] = float(ending == "done")
        trajectory.metadata |= {"outcome": "ok" if ending == "done" else "policy_fault", "ending": ending}
        return trajectory.finish()

    async def _turn(
        self, model: Model[Any, Any], step: int | None, seed: int, trajectory: Trajectory, session: _Session
    ) -> str | None:
        """Take one answer of the model and its actions. Returns the ending if the rollout ended."""
        calls = await take_turn(model, trajectory, step=step, **{"seed": seed, **self._request})
        if isinstance(calls, str):
            return calls
        for call in calls:
            trajectory.metrics["num_actions"] += 1
            result = None
            try:
                action = session.to_action(call.function.name, call.function.arguments)
                result = await self._ask(session.env.step(action))
                text = self._show(result.observation)
                trajectory.reward += float(result.reward or 0.0)
            except _InvalidActionError as error:
                trajectory.metrics["num_invalid_actions"] += 1
                text = f"Error: {error}"
            trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if result is not None and result.done:
                return "done"
        return None if calls else "no_action"

    async def _find_tools(self, env: Any) -> dict[str, Any]:
        """The environment's tools by name, in OpenAI's form."""
        if self._action is None:
            async with httpx2.AsyncClient(headers=self._headers, timeout=_CONNECT_TIMEOUT_S) as http:
                answer = await self._ask(http.get(f"{self._url}/schema"))
            if answer.status_code != 200:
                raise ToolServerError(f"{self._url}/schema answered with HTTP status {answer.status_code}")
            self._action = answer.json()["action"]
        properties = {name: part for name, part in self._action.get("properties", {}).items() if name != "metadata"}
        if properties and not {"tool_name", "arguments"} <= properties.keys():
            return {ACT: _tool(ACT, self._action.get("description", ""), {**self._action, "properties": properties})}
        listed = (await self._ask(env.step({"type": "list_tools"}))).observation["tools"]
        return {tool["name"]: _tool(tool["name"], tool["description"], tool["input_schema"]) for tool in listed}

    async def _ask(self, question: Any) -> Any:
        """Await a call of the environment. Every failure becomes `_InvalidActionError` or `ToolServerError`."""
        try:
            return await question
        except Exception as error:
            if "(code: VALIDATION_ERROR)" in str(error):
                raise _InvalidActionError("the environment does not accept this action") from error
            what = f"{type(error).__name__}: {error}"
            if "CAPACITY_REACHED" in str(error):
                what += "; start the server with a larger `max_concurrent_envs`, or pass a smaller `max_sessions`"
            raise ToolServerError(f"the environment at {self._url} failed: {what}") from error


class _InvalidActionError(Exception):
    """An invalid action, of which the model is told."""


@dataclass(slots=True)
class _Session:
    """One rollout's session in the environment."""

    env: Any
    tools: dict[str, Any]

    def to_action(self, name: str, arguments: str) -> dict[str, Any]:
        try:
            values = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise _InvalidActionError(f"the arguments of {name} are not valid JSON: {error}") from error
        if name not in self.tools or not isinstance(values, dict):
            tools = ", ".join(self.tools)
            raise _InvalidActionError(f"there is no tool {name} with such arguments; the tools are {tools}")
        return values if list(self.tools) == [ACT] else {"type": "call_tool", "tool_name": name, "arguments": values}


def show_observation(observation: dict[str, Any]) -> str:
    """Convert an observation to text: its only text field, or JSON of its fields. A tool's result gives its text.

    Example: {"board": "X..", "metadata": {}} gives `X..`, {"board": "X..", "moves": [1, 2]} gives JSON, and {} gives an
    empty text.
    """
    if "tool_name" in observation:
        if observation.get("error"):
            return f"Error: {observation['error'].get('message', observation['error'])}"
        return _text_of(observation.get("result"))
    shown = {key: value for key, value in observation.items() if value not in (None, "", [], {})}
    for key in ("done", "reward", "metadata"):
        shown.pop(key, None)
    return _text_of(next(iter(shown.values()))) if len(shown) == 1 else json.dumps(shown) if shown else ""


def _text_of(value: Any) -> str:
    if isinstance(value, dict) and isinstance(value.get("content"), list):  # an MCP result
        texts = [part["text"] for part in value["content"] if isinstance(part, dict) and "text" in part]
        if texts:
            return "\n".join(texts)
    return value if isinstance(value, str) else json.dumps(value)


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    schema = {key: value for key, value in parameters.items() if key not in ("title", "description")}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _load_client() -> Any:
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise ConfigError(f"OpenEnv environments need openenv 0.10 or later: {INSTALL}") from error
    return GenericEnvClient
