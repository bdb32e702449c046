"""LangGraph's and LangChain's real libraries against the real application, over a socket."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import operator
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, TypedDict

import openai
import pytest
from pydantic import BaseModel

import art
from art.errors import ConfigError
from art.langgraph import init_chat_model, wrap_rollout
from art.messages import is_choice
from tests.support.served_app import ServedApp

pytest.importorskip("langgraph", reason="needs the extra langgraph")
pytest.importorskip("langchain_openai", reason="needs the extra langgraph")

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def look_up(key: str) -> str:
    """Look up the name of a key."""
    return f"name of {key}"


def call(key: str) -> str:
    return f'<tool_call>\n{{"name": "look_up", "arguments": {{"key": "{key}"}}}}\n</tool_call>'


def agent(**settings: Any) -> Any:
    """An ordinary agent: it calls tools until it has an answer."""
    chat = init_chat_model("gpt-4.1", model_provider="openai", **settings).bind_tools([look_up])

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([look_up]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


def answer_by_prompt(served: ServedApp, answer: Any) -> None:
    """Let the engine answer what `answer` makes of the text of the prompt."""
    renderer = served.app.bench.renderer
    tokenizer = renderer.tokenizer

    def script(request: Any) -> list[int]:
        text = answer(tokenizer.text(request.prompt_token_ids))
        return [*tokenizer.encode(text, add_special_tokens=False), renderer.stop_token_ids[0]]

    served.app.bench.engine.script = script


def texts(history: art.History) -> list[Any]:
    return [message["content"] for message in history.messages()]


@pytest.mark.parametrize("whose", ["policy", "outside"])
async def test_concurrent_agents_with_tools(served: ServedApp, whose: str) -> None:
    model = served.policy if whose == "policy" else served.outside
    keys = ["hello", "world", "key"]

    def answer(prompt: str) -> str:
        key = next(key for key in keys if f"user\nwhat is {key}" in prompt)
        return f"it is {key}" if f"name of {key}" in prompt else call(key)

    answer_by_prompt(served, answer)

    async def rollout(model: art.Model, key: str) -> art.Trajectory:
        result = await agent(temperature=0.5, max_tokens=100).ainvoke({"messages": [("user", f"what is {key}")]})
        assert result["messages"][-1].content == f"it is {key}"
        return art.Trajectory(reward=len(key), metadata={"key": key})

    group = await art.TrajectoryGroup(wrap_rollout(model, rollout)(model, key) for key in keys)
    for key, trajectory in zip(keys, group, strict=True):
        assert texts(trajectory) == [f"what is {key}", "", f"name of {key}", f"it is {key}"]
        assert [is_choice(item) for item in trajectory.messages_and_choices] == [False, True, False, True]
        assert trajectory.tools[0]["function"]["name"] == "look_up"
        assert (trajectory.reward, trajectory.metadata["key"], trajectory.additional_histories) == (len(key), key, [])
        assert all(item.exchange_id for item in trajectory.messages_and_choices if is_choice(item))
    assert {request.temperature for request in served.app.bench.engine.requests} == {0.5}
    assert {request.max_tokens for request in served.app.bench.engine.requests} == {100}


async def test_streams_of_a_graph_are_streams(served: ServedApp) -> None:
    served.app.bench.answers(call("hello"), "it is hello")
    pieces: list[str] = []

    async def rollout() -> art.Trajectory:
        graph = agent(streaming=True)
        async for chunk, _ in graph.astream({"messages": [("user", "what?")]}, stream_mode="messages"):
            if chunk.type == "AIMessageChunk":
                pieces.append(chunk.content)
        return art.Trajectory()

    trajectory = await wrap_rollout(served.policy, rollout)()
    assert "".join(pieces) == "it is hello"
    assert len(pieces) > 3
    assert texts(trajectory) == ["what?", "", "name of hello", "it is hello"]


async def test_as_a_decorator(served: ServedApp) -> None:
    served.app.bench.answers("hello")

    @wrap_rollout(served.policy)
    async def rollout(question: str) -> art.Trajectory:
        await init_chat_model("gpt-4.1").ainvoke(question)
        return art.Trajectory(reward=1.0)

    trajectory = await rollout("hi")
    assert (texts(trajectory), trajectory.reward, rollout.__name__) == (["hi", "hello"], 1.0, "rollout")


async def test_a_sub_graph_is_a_history(served: ServedApp) -> None:
    """The sub-agent has messages of its own, and so a history of its own."""

    class State(TypedDict):
        notes: Annotated[list[str], operator.add]

    answer_by_prompt(served, lambda prompt: "it is long" if "sub" in prompt else "done")

    async def rollout() -> art.Trajectory:
        chat = init_chat_model()

        async def sub(state: State) -> dict[str, Any]:
            return {"notes": [str((await chat.ainvoke([SystemMessage("sub"), HumanMessage("go")])).content)]}

        async def lead(state: State) -> dict[str, Any]:
            said = await chat.ainvoke("start")
            last = await chat.ainvoke([HumanMessage("start"), said, HumanMessage(state["notes"][0])])
            return {"notes": [str(last.content)]}

        inner = StateGraph(State)
        inner.add_node("sub", sub)
        inner.add_edge(START, "sub")
        outer = StateGraph(State)
        outer.add_node("inner", inner.compile())
        outer.add_node("lead", lead)
        outer.add_edge(START, "inner")
        outer.add_edge("inner", "lead")
        outer.add_edge("lead", END)
        result = await outer.compile().ainvoke({"notes": []})
        return art.Trajectory(logs=[*result["notes"]])

    trajectory = await wrap_rollout(served.policy, rollout)()
    assert texts(trajectory) == ["start", "done", "it is long", "done"]
    assert [texts(history) for history in trajectory.additional_histories] == [["sub", "go", "it is long"]]


class Person(BaseModel):
    """Somebody."""

    name: str


async def test_an_engine_without_grammars_refuses_structured_output_by_name(served: ServedApp) -> None:
    async def rollout() -> art.Trajectory:
        for method, param in (("json_schema", "response_format"), ("function_calling", "tool_choice")):
            with pytest.raises(openai.BadRequestError, match=f"`{param}.*needs an engine that samples under a grammar"):
                await init_chat_model().with_structured_output(Person, method=method).ainvoke("who?")
        served.app.bench.answers("hello")
        await init_chat_model().ainvoke("hi")
        return art.Trajectory()

    await wrap_rollout(served.policy, rollout)()


@pytest.mark.parametrize("whose", ["policy", "outside"])
async def test_graphs_that_block(served: ServedApp, whose: str) -> None:
    model = served.policy if whose == "policy" else served.outside
    served.app.bench.answers("hello", "world")

    def run() -> str:
        chat = init_chat_model()
        said = chat.invoke("hi")
        return "".join(str(chunk.content) for chunk in chat.stream([HumanMessage("hi"), said, HumanMessage("so")]))

    async def rollout() -> art.Trajectory:
        assert await asyncio.to_thread(run) == "world"
        return art.Trajectory()

    assert texts(await wrap_rollout(model, rollout)()) == ["hi", "hello", "so", "world"]


async def test_arguments(served: ServedApp) -> None:
    async with art.capture(served.policy):
        chat = init_chat_model("gpt", timeout=7, max_retries=0, default_headers={"x-trace": "1"}, top_p=0.9)
        assert isinstance(chat, ChatOpenAI)
        assert (chat.root_async_client.timeout, chat.root_async_client.max_retries, chat.top_p) == (7, 0, 0.9)
        assert (chat.root_client.timeout, chat.root_client.default_headers["x-trace"]) == (7, "1")
        steps = [init_chat_model(name).model_name for name in ("gpt", "games/agent@2", "other@2")]
        assert steps == ["games/agent", "games/agent@2", "games/agent"]
        assert init_chat_model().root_async_client.max_retries == served.policy.openai_client().max_retries
        with pytest.raises(ConfigError, match="does not support base_url, configurable_fields"):
            init_chat_model(base_url="http://x", configurable_fields=["temperature"])
        with pytest.raises(openai.BadRequestError, match="needs an engine that samples under a grammar"):
            await init_chat_model().bind_tools([look_up], tool_choice="look_up").ainvoke("hi")
    async with art.capture(served.outside):
        assert type(init_chat_model()) is ChatOpenAI
        with pytest.raises(ConfigError, match="only chat completions are captured"):
            init_chat_model(use_responses_api=True)


async def test_wrong_use(served: ServedApp) -> None:
    with pytest.raises(ConfigError, match="inside a rollout"):
        init_chat_model()

    async def silent() -> art.Trajectory:
        return art.Trajectory()

    async def none() -> None: ...

    with pytest.raises(ConfigError, match="did not call the model"):
        await wrap_rollout(served.policy, silent)()
    with pytest.raises(ConfigError, match=r"must return an `art.Trajectory`, got NoneType"):
        await wrap_rollout(served.policy, none)()  # type: ignore[arg-type]
    assert wrap_rollout(served.policy, silent).__name__ == "silent"


async def test_the_trajectory_of_the_capture_can_be_returned(served: ServedApp) -> None:
    served.app.bench.answers("hello")

    async def rollout() -> art.Trajectory:
        await init_chat_model().ainvoke("hi")
        trajectory = art.auto_trajectory(required=True)
        trajectory.reward = 0.5
        return trajectory

    trajectory = await wrap_rollout(served.policy, rollout)()
    assert (texts(trajectory), trajectory.reward) == (["hi", "hello"], 0.5)


EXAMPLE = Path(__file__).parents[3] / "examples/langgraph"


async def test_the_agent_of_the_example(served: ServedApp) -> None:
    spec = importlib.util.spec_from_file_location("agent", EXAMPLE / "agent.py")
    assert spec is not None
    assert spec.loader is not None
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    (ticket,) = agent.draw_tickets("train", seed=0, count=1)

    def use(name: str, **arguments: Any) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    served.app.bench.answers(use("read_ticket"), use("send_to", team="nobody"), use("send_to", team=ticket.team), "bye")
    best = await agent.rollout(served.policy, ticket)
    assert (best.reward, best.metrics["right"]) == (1.0, 1.0)
    assert [m["content"] for m in best.messages() if m["role"] == "tool"] == [ticket.text, "there is no team nobody"]
    assert sum(map(is_choice, best.messages_and_choices)) == 3
    worst = await agent.rollout(served.policy, ticket)
    assert (worst.reward, worst.metrics["right"]) == (-0.25, 0.0)
    assert best.tools == worst.tools
    assert not {*agent.all_tickets("train")} & {*agent.all_tickets("test")}


WITHOUT = """
import asyncio, sys
sys.modules["langchain_openai"] = None
import art

async def main():
    model = art.Model(name="m", project="p", inference_base_url="http://x/v1", inference_api_key="k")
    async with art.capture(model):
        try:
            art.langgraph.init_chat_model()
        except art.errors.ConfigError as error:
            print(error)

asyncio.run(main())
"""


def test_without_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert "pip install 'agent-reinforcement-trainer[langgraph]'" in done.stdout
