"""openai-agents: a run over chat completions, and a streamed one over the Responses API."""

from __future__ import annotations

import asyncio

import agents
import openai
from common import KEY, MODEL, QUESTION, URL, main
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


def _client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)


main(tools=tools, streamed=streamed)
