"""LangChain's `create_agent`: with a tool, and with a `response_format` by a tool call and by the provider's own."""

from __future__ import annotations

from typing import Any

from common import KEY, MODEL, QUESTION, QUESTIONS, URL, Place, look_up, look_up_or_error, main
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY)  # type: ignore[arg-type]
ASKED: Any = {"messages": [{"role": "user", "content": QUESTION}]}


def tools() -> str:
    return str(create_agent(model, tools=[look_up]).invoke(ASKED)["messages"][-1].content)


def streamed() -> str:
    stream = create_agent(model, tools=[look_up]).stream(ASKED, stream_mode="messages")
    pieces = [piece.content for piece, about in stream if about["langgraph_node"] == "model"]
    assert len(pieces) > 2
    return "".join(pieces)


def turns() -> str:
    agent = create_agent(model, tools=[tool("look_up")(look_up_or_error)])
    messages: list[Any] = []
    for question in QUESTIONS:
        messages = agent.invoke({"messages": [*messages, {"role": "user", "content": question}]})["messages"]
    return str(messages[-1].text)


def structured() -> Any:
    return create_agent(model, response_format=Place).invoke(ASKED)["structured_response"].model_dump()


def structured_streamed() -> Any:
    agent = create_agent(model, response_format=ProviderStrategy(Place))
    pieces, state = [], {}
    for mode, part in agent.stream(ASKED, stream_mode=["messages", "values"]):
        if mode == "messages":
            pieces.append(part)
        else:
            state = part
    assert len(pieces) > 1
    return state["structured_response"].model_dump()


main(
    "langchain",
    tools=tools,
    streamed=streamed,
    structured=structured,
    structured_streamed=structured_streamed,
    turns=turns,
)
