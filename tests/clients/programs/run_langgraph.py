"""LangGraph: a graph of one's own around a model with tools, and `with_structured_output`."""

from __future__ import annotations

from typing import Any

from common import KEY, MODEL, QUESTION, URL, Place, look_up, main
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY)  # type: ignore[arg-type]
ASKED: Any = {"messages": [{"role": "user", "content": QUESTION}]}


def tools() -> str:
    return str(_graph().invoke(ASKED)["messages"][-1].content)


def streamed() -> str:
    stream = _graph().stream(ASKED, stream_mode="messages")
    pieces = [piece.content for piece, about in stream if about["langgraph_node"] == "model"]
    assert len(pieces) > 2
    return "".join(pieces)


def structured() -> Any:
    return model.with_structured_output(Place, method="function_calling").invoke(QUESTION).model_dump()


def structured_streamed() -> Any:
    *_, last = model.with_structured_output(Place).stream(QUESTION)
    return last.model_dump()


def _graph() -> Any:
    with_tools = model.bind_tools([look_up])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [with_tools.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([look_up]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


main("langgraph", tools=tools, streamed=streamed, structured=structured, structured_streamed=structured_streamed)
