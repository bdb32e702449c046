"""AutoGen: an AssistantAgent with a tool, and one with an `output_content_type`, with and without a stream."""

from __future__ import annotations

import asyncio
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient
from common import KEY, MODEL, QUESTION, URL, Place, main
from common import look_up as find

INFO: Any = {
    "vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": ModelFamily.UNKNOWN,
}  # fmt: skip


async def look_up(key: str) -> str:
    """Find a value by its key."""
    return find(key)


def tools() -> str:
    result = asyncio.run(_agent(tools=[look_up], reflect_on_tool_use=True).run(task=QUESTION))
    return str(result.messages[-1].content)


def streamed() -> str:
    agent = _agent(tools=[look_up], reflect_on_tool_use=True, model_client_stream=True)
    return "".join(asyncio.run(_events(agent))[0])


def structured() -> Any:
    return asyncio.run(_agent(output_content_type=Place).run(task=QUESTION)).messages[-1].content.model_dump()


def structured_streamed() -> Any:
    return asyncio.run(_events(_agent(output_content_type=Place, model_client_stream=True)))[1].content.model_dump()


async def _events(agent: Any) -> tuple[list[str], Any]:
    """The pieces of text, and the last message."""
    events = [event async for event in agent.run_stream(task=QUESTION)]
    pieces = [event.content for event in events if isinstance(event, ModelClientStreamingChunkEvent)]
    assert len(pieces) > 1
    return pieces, events[-1].messages[-1]


def _agent(**settings: Any) -> Any:
    client = OpenAIChatCompletionClient(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, model_info=INFO)
    return AssistantAgent("clerk", client, **settings)


main(
    "autogen-agentchat", tools=tools, streamed=streamed, structured=structured, structured_streamed=structured_streamed
)
