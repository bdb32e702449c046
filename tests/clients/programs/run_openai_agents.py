"""openai-agents: runs over chat completions, and streamed ones over the Responses API."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import openai
from common import KEY, MODEL, QUESTION, QUESTIONS, URL, Place, main
from common import look_up as find

agents.set_tracing_disabled(True)


@agents.function_tool
def look_up(key: str) -> str:
    """Find a value by its key."""
    return find(key)


def tools() -> str:
    agent = agents.Agent(name="clerk", model=agents.OpenAIChatCompletionsModel(MODEL, _client()), tools=[look_up])
    return str(agents.Runner.run_sync(agent, QUESTION).final_output)


def streamed() -> str:
    async def run() -> str:
        agent = agents.Agent(name="clerk", model=agents.OpenAIResponsesModel(MODEL, _client()), tools=[look_up])
        result = agents.Runner.run_streamed(agent, QUESTION)
        pieces = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return "".join(pieces)

    return asyncio.run(run())


def turns() -> str:
    agent = agents.Agent(name="clerk", model=agents.OpenAIResponsesModel(MODEL, _client()), tools=[look_up])
    items: list[Any] = []
    for question in QUESTIONS:
        result = agents.Runner.run_sync(agent, [*items, {"role": "user", "content": question}])
        items = result.to_input_list()
    return str(result.final_output)


def structured() -> Any:
    model = agents.OpenAIChatCompletionsModel(MODEL, _client())
    agent = agents.Agent(name="clerk", model=model, output_type=Place)
    return agents.Runner.run_sync(agent, QUESTION).final_output.model_dump()


def structured_streamed() -> Any:
    async def run() -> Any:
        agent = agents.Agent(name="clerk", model=agents.OpenAIResponsesModel(MODEL, _client()), output_type=Place)
        result = agents.Runner.run_streamed(agent, QUESTION)
        assert len([event async for event in result.stream_events() if event.type == "raw_response_event"]) > 1
        return result.final_output.model_dump()

    return asyncio.run(run())


def _client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)


main(
    "openai-agents",
    tools=tools,
    streamed=streamed,
    structured=structured,
    structured_streamed=structured_streamed,
    turns=turns,
)
