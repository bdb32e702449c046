"""pydantic-ai: an agent with a tool, and one with an `output_type`, with and without a stream."""

from __future__ import annotations

import asyncio
from typing import Any

from common import KEY, MODEL, QUESTION, QUESTIONS, URL, Place, look_up, main
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))


def tools() -> str:
    return Agent(model, tools=[look_up]).run_sync(QUESTION).output


def streamed() -> str:
    async def run() -> str:
        async with Agent(model, tools=[look_up]).run_stream(QUESTION) as result:
            pieces = [piece async for piece in result.stream_text(delta=True)]
        return "".join(pieces)

    return asyncio.run(run())


def turns() -> str:
    agent = Agent(model)

    @agent.tool_plain(name="look_up")
    def find(key: str) -> str:
        try:
            return look_up(key)
        except LookupError as error:
            raise ModelRetry(str(error)) from error

    history: Any = None
    for question in QUESTIONS:
        result = agent.run_sync(question, message_history=history)
        history = result.all_messages()
    return result.output


def structured() -> Any:
    return Agent(model, output_type=Place).run_sync(QUESTION).output.model_dump()


def structured_streamed() -> Any:
    async def run() -> Any:
        async with Agent(model, output_type=Place).run_stream(QUESTION) as result:
            assert [piece async for piece in result.stream_output()]
            return (await result.get_output()).model_dump()

    return asyncio.run(run())


main(
    "pydantic-ai-slim",
    tools=tools,
    streamed=streamed,
    structured=structured,
    structured_streamed=structured_streamed,
    turns=turns,
)
