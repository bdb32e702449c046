"""Structured output of real libraries, as their users write it, from a model whose weights know nothing of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

import art
from art.langgraph import init_chat_model, wrap_rollout
from tests.support.forms import open_form_bench
from tests.support.gateway import make_tokenizer
from tests.support.served_app import ServedApp, serve_app


class Move(BaseModel):
    """The next move."""

    model_config = ConfigDict(extra="forbid")  # random tokens might else add properties until the context is full

    column: Literal["a", "b", "c"]
    row: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.fixture
async def served(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[ServedApp]:
    async with serve_app(tmp_path, tokenizer_dir, open_form_bench) as opened:
        yield opened


def check_record(served: ServedApp, trajectory: art.Trajectory) -> None:
    """Every answer of the trajectory is recorded with the grammar that it was drawn from."""
    choices: list[Any] = [one for one in trajectory.messages_and_choices if not isinstance(one, dict)]
    assert choices
    for choice in choices:
        [made] = served.app.bench.recorder.get([choice.exchange_id])
        assert made.constraint is not None
        assert made.constraint.grammar


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_with_structured_output_of_langchain(served: ServedApp, method: str) -> None:
    answers: list[Any] = []

    async def rollout() -> art.Trajectory:
        chat = init_chat_model().with_structured_output(Move, method=method)
        answers.append(await chat.ainvoke("your move"))
        answers.extend([part async for part in chat.astream("your move")][-1:])
        return art.Trajectory()

    trajectory = await wrap_rollout(served.policy, rollout)()
    assert len(answers) == 2
    assert all(isinstance(answer, Move) for answer in answers)
    check_record(served, trajectory)


@pytest.mark.parametrize("strategy", ["ToolStrategy", "ProviderStrategy"])
async def test_create_agent_of_langchain(served: ServedApp, strategy: str) -> None:
    pytest.importorskip("langchain.agents", reason="needs the package langchain")
    from langchain.agents import create_agent, structured_output

    async def rollout() -> art.Trajectory:
        form = getattr(structured_output, strategy)(Move)
        graph = create_agent(init_chat_model(), tools=[], response_format=form)
        result = await graph.ainvoke({"messages": [("user", "your move")]})
        assert isinstance(result["structured_response"], Move)
        return art.Trajectory()

    check_record(served, await wrap_rollout(served.policy, rollout)())


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
@pytest.mark.parametrize("responses", [False, True])
async def test_output_type_of_pydantic_ai(served: ServedApp, output: str, responses: bool) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="needs the extra pydantic-ai")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(openai_client=served.policy.openai_client())
    kind = OpenAIResponsesModel if responses else OpenAIChatModel
    model = kind(served.policy.get_inference_name(), provider=provider)
    agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, output)(Move))
    settings = {"parallel_tool_calls": False}
    async with art.capture(served.policy) as captured:
        assert isinstance((await agent.run("your move", model_settings=settings)).output, Move)
    check_record(served, captured.trajectory)
    async with agent.run_stream("your move", model_settings=settings) as result:
        assert isinstance(await result.get_output(), Move)


@pytest.mark.parametrize("use_responses", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
async def test_output_type_of_openai_agents(served: ServedApp, use_responses: bool, streamed: bool) -> None:
    agents = pytest.importorskip("agents", reason="needs the extra openai-agents")
    provider = agents.OpenAIProvider(openai_client=served.policy.openai_client(), use_responses=use_responses)
    config = agents.RunConfig(
        model=served.policy.get_inference_name(), model_provider=provider, tracing_disabled=True
    )  # fmt: skip
    agent = agents.Agent(name="player", instructions="play", output_type=Move)
    async with art.capture(served.policy) as captured:
        if streamed:
            result = agents.Runner.run_streamed(agent, "your move", run_config=config)
            assert [event async for event in result.stream_events()]
        else:
            result = await agents.Runner.run(agent, "your move", run_config=config)
    assert isinstance(result.final_output, Move)
    check_record(served, captured.trajectory)


async def test_a_forced_tool_of_openai_agents(served: ServedApp) -> None:
    agents = pytest.importorskip("agents", reason="needs the extra openai-agents")
    played: list[tuple[str, int]] = []

    def play(column: Literal["a", "b", "c"], row: Literal[1, 2, 3]) -> str:
        """Play a move."""
        played.append((column, row))
        return "played"

    provider = agents.OpenAIProvider(openai_client=served.policy.openai_client())
    config = agents.RunConfig(
        model=served.policy.get_inference_name(), model_provider=provider, tracing_disabled=True,
        model_settings=agents.ModelSettings(tool_choice="play", parallel_tool_calls=False),
    )  # fmt: skip
    agent = agents.Agent(
        name="player", tools=[agents.function_tool(play)], tool_use_behavior="stop_on_first_tool"
    )  # fmt: skip
    await agents.Runner.run(agent, "your move", run_config=config)
    [(column, row)] = played
    assert column in "abc"
    assert row in (1, 2, 3)
