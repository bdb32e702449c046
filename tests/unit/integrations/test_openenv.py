"""Environments behind the real server of OpenEnv, played through the real application."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import ConfigError, ToolServerError
from art.messages import is_choice
from art_tasks.openenv import OpenEnvTask, show_observation
from tests.support.gateway import make_tokenizer
from tests.support.served_app import ServedApp, serve_app

pytest.importorskip("openenv.core", reason="needs the extra openenv")

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """Guess the number."""

    number: int


class Hint(Observation):
    hint: str


class GuessEnvironment(Environment[Guess, Hint, State]):
    """A number from 1 to 8 that follows from the seed. A right guess earns 1, and each guess costs 0.1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.number = random.Random(seed).randint(1, 8)
        return Hint(hint="a number from 1 to 8?")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.number == 0:
            raise OSError("out of order")
        if action.number == self.number:
            return Hint(hint="right", done=True, reward=0.9)
        return Hint(hint="higher" if action.number < self.number else "lower", reward=-0.1)

    @property
    def state(self) -> State:
        return State()


class ToolEnvironment(MCPEnvironment):
    """One tool, whose second call ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("echo")

        @mcp.tool
        def echo(text: str) -> str:
            """Say it again."""
            return f"{text} again"

        super().__init__(mcp)
        self.num_calls = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation()

    def step(self, action: Action, timeout_s: float | None = None, **rest: Any) -> Observation:
        return self._count(super().step(action, timeout_s, **rest))

    async def step_async(self, action: Action, timeout_s: float | None = None, **rest: Any) -> Observation:
        return self._count(await super().step_async(action, timeout_s, **rest))

    def _count(self, seen: Observation) -> Observation:
        if isinstance(seen, CallToolObservation):
            self.num_calls += 1
            seen.reward, seen.done = 0.5, self.num_calls == 2
        return seen

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


@asynccontextmanager
async def serve(app: Any) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
async def guess() -> AsyncIterator[str]:
    async with serve(create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=2)) as url:
        yield url


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.fixture
async def served(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[ServedApp]:
    async with serve_app(tmp_path, tokenizer_dir) as opened:
        yield opened


def use(tool: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def count_up(served: ServedApp) -> None:
    """Let the engine guess 1, 2, 3, ..."""
    renderer = served.app.bench.renderer
    tokenizer = renderer.tokenizer

    def script(request: Any) -> list[int]:
        text = tokenizer.text(request.prompt_token_ids)
        said = use("act", number=text.count("higher") + 1)
        return [*tokenizer.encode(said, add_special_tokens=False), renderer.stop_token_ids[0]]

    served.app.bench.engine.script = script


async def test_rollouts_at_once(served: ServedApp, guess: str) -> None:
    count_up(served)
    task = OpenEnvTask(guess, max_sessions=2, request={"max_completion_tokens": 200})
    scenarios = task.scenarios("train", seed=0, count=5)
    group = await art.TrajectoryGroup(task.rollout(served.policy, scenario) for scenario in scenarios)
    numbers = [random.Random(scenario.seed % 2**31).randint(1, 8) for scenario in scenarios]
    for number, trajectory in zip(numbers, group, strict=True):
        assert trajectory.reward == pytest.approx(1 - 0.1 * number)
        assert (trajectory.metrics["num_actions"], trajectory.metadata["ending"]) == (number, "done")
        shown = [message["content"] for message in trajectory.messages() if message["role"] in ("user", "tool")]
        assert shown == ["a number from 1 to 8?", *["higher"] * (number - 1), "right"]
        assert all(item.exchange_id for item in trajectory.messages_and_choices if is_choice(item))
    (tool,) = group.trajectories[0].tools
    assert tool["function"]["description"] == "Guess the number."
    assert tool["function"]["parameters"]["properties"].keys() == {"number"}
    assert (
        len({scenario.seed for split in ("train", "test") for scenario in task.scenarios(split, seed=0, count=9)}) == 18
    )


async def test_what_the_policy_spoils_counts(served: ServedApp, guess: str) -> None:
    task = OpenEnvTask(guess, max_turns=2)
    (scenario,) = task.scenarios("train", seed=0, count=1)
    served.app.bench.answers(use("act", number="x"), use("jump"), "I give up")
    late = await task.rollout(served.policy, scenario)
    errors = [message["content"] for message in late.messages() if message["role"] == "tool"]
    assert errors == [
        "Error: the environment does not accept this action",
        "Error: there is no tool jump with such arguments; the tools are act",
    ]
    assert (late.metadata["ending"], late.metadata["outcome"]) == ("out_of_turns", "policy_fault")
    assert late.metrics["num_invalid_actions"] == 2
    silent = await task.rollout(served.policy, scenario)
    assert (silent.metadata["ending"], silent.reward) == ("no_action", 0.0)


async def test_a_failure_is_no_reward_of_0(served: ServedApp, guess: str) -> None:
    task = OpenEnvTask(guess, max_sessions=9)
    (scenario,) = task.scenarios("train", seed=0, count=1)
    served.app.bench.answers(use("act", number=0))
    with pytest.raises(ToolServerError, match="out of order"):
        await task.rollout(served.policy, scenario)
    served.app.bench.engine.delay_s = 0.3
    served.app.bench.answers(*["no"] * 3)
    results = await asyncio.gather(*(task.rollout(served.policy, scenario) for _ in range(3)), return_exceptions=True)
    (full,) = [result for result in results if isinstance(result, Exception)]
    assert "max_concurrent_envs" in str(full)
    with pytest.raises(ToolServerError, match="failed"):
        await OpenEnvTask("http://127.0.0.1:9").rollout(served.policy, scenario)


async def test_an_environment_with_tools(served: ServedApp) -> None:
    served.app.bench.answers(use("echo", text="hello"), use("echo", text="world"))
    async with serve(create_fastapi_app(ToolEnvironment, CallToolAction, CallToolObservation)) as url:
        task = OpenEnvTask(url, max_sessions=1)
        trajectory = await task.rollout(served.policy, task.scenarios("train", seed=0, count=1)[0])
    assert trajectory.tools is not None
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["echo"]
    assert [m["content"] for m in trajectory.messages() if m["role"] == "tool"] == ["hello again", "world again"]
    assert (trajectory.reward, trajectory.metadata["ending"]) == (1.0, "done")


def test_observations_as_text() -> None:
    assert show_observation({"board": "X..", "metadata": {}, "reward": 1, "done": False}) == "X.."
    assert show_observation({"board": "X..", "moves": [1, 2]}) == '{"board": "X..", "moves": [1, 2]}'
    assert show_observation({"number": 3}) == "3"
    assert show_observation({}) == ""
    assert show_observation({"tool_name": "t", "error": {"message": "no such tool"}}) == "Error: no such tool"


def test_limits() -> None:
    with pytest.raises(ConfigError, match="`max_turns` and `max_sessions` must be at least 1, got 0"):
        OpenEnvTask("http://x", max_turns=0)
