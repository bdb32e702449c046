"""llama-index: a FunctionAgent, and a structured LLM, with and without a stream."""

from __future__ import annotations

import asyncio
from typing import Any

from common import KEY, MODEL, QUESTION, URL, Place, look_up, main
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_retries=0
)


def tools() -> str:
    async def run() -> str:
        return str(await FunctionAgent(tools=[look_up], llm=llm, streaming=False).run(QUESTION))

    return asyncio.run(run())


def streamed() -> str:
    async def run() -> str:
        handler = FunctionAgent(tools=[look_up], llm=llm).run(QUESTION)
        pieces = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
        assert len(pieces) > 2
        await handler
        return "".join(pieces)

    return asyncio.run(run())


def structured() -> Any:
    return llm.as_structured_llm(Place).chat([ChatMessage(QUESTION)]).raw.model_dump()


def structured_streamed() -> Any:
    *_, last = llm.as_structured_llm(Place).stream_chat([ChatMessage(QUESTION)])
    return last.raw.model_dump()


main("llama-index-core", tools=tools, streamed=streamed, structured=structured, structured_streamed=structured_streamed)
