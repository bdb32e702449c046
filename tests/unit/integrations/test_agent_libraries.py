"""Agents of other libraries as they are, with the real libraries, against the real application over a socket."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import art
from art.errors import ConfigError
from art.messages import is_choice
from art_tasks.openenv import OpenEnvTask
from art_tasks.verifiers import VerifiersTask
from tests.support.gateway import make_tokenizer
from tests.support.served_app import ServedApp, serve_app


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.fixture
async def served(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[ServedApp]:
    async with serve_app(tmp_path, tokenizer_dir) as opened:
        yield opened


def look_up(key: str) -> str:
    """Look up the name of a key."""
    return f"name of {key}"


class Person(BaseModel):
    """Somebody."""

    name: str


def use(tool: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'


CALL = use("look_up", '{"key": "x"}')


def texts(history: art.History) -> list[Any]:
    return [message.get("content") for message in history.messages()]


def check(trajectory: art.Trajectory) -> None:
    """The whole conversation with its tool, every answer as it was recorded."""
    assert texts(trajectory) == ["be brief", "what is x?", "", "name of x", "it is hello"]
    assert [is_choice(item) for item in trajectory.messages_and_choices] == [False, False, True, False, True]
    assert all(item.exchange_id for item in trajectory.messages_and_choices if is_choice(item))
    assert trajectory.tools is not None
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["look_up"]
    assert trajectory.additional_histories == []


def openai_agents_config(model: art.TrainableModel, **settings: Any) -> Any:
    import agents

    provider = agents.OpenAIProvider(openai_client=model.openai_client(), **settings)
    return agents.RunConfig(
        model=model.get_inference_name(), model_provider=provider, tracing_disabled=True,
        model_settings=agents.ModelSettings(temperature=1.0),
    )  # fmt: skip


@pytest.mark.parametrize(("use_responses", "streamed"), [(True, True), (False, False)])
async def test_openai_agents(served: ServedApp, use_responses: bool, streamed: bool) -> None:
    agents = pytest.importorskip("agents", reason="needs the extra openai-agents")
    served.app.bench.answers(CALL, "it is hello")
    agent = agents.Agent(name="helper", instructions="be brief", tools=[agents.function_tool(look_up)])
    async with art.capture(served.policy) as captured:
        config = openai_agents_config(served.policy, use_responses=use_responses)
        if streamed:
            result = agents.Runner.run_streamed(agent, "what is x?", run_config=config)
            assert [event async for event in result.stream_events()]
        else:
            result = await agents.Runner.run(agent, "what is x?", run_config=config)
    assert result.final_output == "it is hello"
    check(captured.trajectory)
    assert {request.temperature for request in served.app.bench.engine.requests} == {1.0}


async def test_a_handoff_of_openai_agents_is_a_history(served: ServedApp) -> None:
    agents = pytest.importorskip("agents", reason="needs the extra openai-agents")
    served.app.bench.answers(use("transfer_to_second", "{}"), "done")
    second = agents.Agent(name="second", instructions="two")
    first = agents.Agent(name="first", instructions="one", handoffs=[second])
    async with art.capture(served.policy) as captured:
        result = await agents.Runner.run(first, "go", run_config=openai_agents_config(served.policy))
    assert (result.final_output, result.last_agent.name) == ("done", "second")
    trajectory = captured.trajectory
    assert texts(trajectory)[::4] == ["two", "done"]
    assert [texts(history) for history in trajectory.additional_histories] == [["one", "go", ""]]
    said = [*trajectory.messages_and_choices, *trajectory.additional_histories[0].messages_and_choices]
    assert sum(map(is_choice, said)) == 2  # each answer is trained on once


def pydantic_ai_model(model: art.TrainableModel) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.profiles import ModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel(
        model.get_inference_name(), provider=OpenAIProvider(openai_client=model.openai_client()),
        profile=ModelProfile(supports_forced_tool_choice=False),
    )  # fmt: skip


async def test_pydantic_ai(served: ServedApp) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="needs the extra pydantic-ai")
    served.app.bench.answers(CALL, "it is hello", CALL, "it is hello")
    agent = pydantic_ai.Agent(pydantic_ai_model(served.policy), instructions="be brief", tools=[look_up])
    async with art.capture(served.policy) as captured:
        assert (await agent.run("what is x?")).output == "it is hello"
    check(captured.trajectory)
    async with art.capture(served.policy) as captured, agent.run_stream("what is x?") as result:
        assert "".join([piece async for piece in result.stream_text(delta=True)]) == "it is hello"
    check(captured.trajectory)


async def test_structured_output_of_pydantic_ai_is_a_tool(served: ServedApp) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="needs the extra pydantic-ai")
    served.app.bench.answers(use("final_result", '{"name": "hello"}'))
    agent = pydantic_ai.Agent(pydantic_ai_model(served.policy), output_type=Person)
    async with art.capture(served.policy) as captured:
        assert (await agent.run("who?")).output == Person(name="hello")
    assert captured.trajectory.tools is not None
    assert captured.trajectory.tools[0]["function"]["name"] == "final_result"


@pytest.mark.filterwarnings("ignore:Item 'summary' on TypedDict class")  # litellm's own types
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("transport", ["aiohttp", "httpx", "blocking"])
async def test_litellm(served: ServedApp, provider: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients are its own: one for OpenAI, one of its own making, by either transport; each is captured."""
    litellm = pytest.importorskip("litellm", reason="needs the extra rewards")
    monkeypatch.setattr(litellm, "disable_aiohttp_transport", transport == "httpx")
    litellm.in_memory_llm_clients_cache.flush_cache()  # a client that it keeps has the transport of another test
    served.app.bench.answers(CALL, "it is hello", "and goodbye")
    model = served.policy
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is x?"}]
    parameters = model.litellm_completion_params() | {"model": f"{provider}/{model.get_inference_name()}"}

    async def ask(**settings: Any) -> Any:
        settings = {"messages": messages, "tools": [tool], **parameters, **settings}
        if transport == "blocking":
            return await asyncio.to_thread(litellm.completion, **settings)
        return await litellm.acompletion(**settings)

    async def rollout() -> None:
        called = (await ask()).choices[0].message
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "name of x"}
        messages.extend([called.model_dump(exclude_none=True), result])
        answer = (await ask()).choices[0].message
        messages.extend([answer.model_dump(exclude_none=True), {"role": "user", "content": "bye"}])
        stream = await ask(stream=True)
        chunks = await asyncio.to_thread(list, stream) if transport == "blocking" else [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "and goodbye"

    trajectory = await art.capture_auto_trajectory(rollout())
    assert texts(trajectory)[-3:] == ["it is hello", "bye", "and goodbye"]
    trajectory.messages_and_choices = trajectory.messages_and_choices[:5]
    check(trajectory)
    assert trajectory.metadata["rollout_id"]


@pytest.mark.parametrize(("make", "package"), [(VerifiersTask, "verifiers"), (OpenEnvTask, "openenv")])
def test_without_the_extra(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'agent-reinforcement-trainer\[{package}\]'"):
        make("x")
