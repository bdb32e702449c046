"""A LangGraph agent that answers questions about a mailbox. What ART needs are the two lines with a comment."""

import json
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import art
from art.langgraph import init_chat_model, wrap_rollout  # was: from langchain.chat_models import init_chat_model
from art.task import Scenario
from art.tasks.search_emails import FOUND_BONUS, NO_IDEA, OUTCOMES, READ_BONUS, Desk, open_desk, question_about

MAX_MESSAGES = 14


def make_tools(desk: Desk) -> list[Any]:
    @tool
    async def search_emails(keywords: list[str]) -> str:
        """Find emails by keywords."""
        return desk.call("search_emails", json.dumps({"keywords": keywords}))

    @tool
    async def read_email(message_id: int) -> str:
        """Read an email."""
        return desk.call("read_email", json.dumps({"message_id": message_id}))

    @tool
    async def return_final_answer(answer: str) -> str:
        """Answer."""
        return desk.call("return_final_answer", json.dumps({"answer": answer}))

    return [search_emails, read_email, return_final_answer]


def build_agent(desk: Desk) -> Any:
    tools = make_tools(desk)
    chat = init_chat_model("gpt-4.1", max_tokens=80).bind_tools(tools)

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    def is_over(state: MessagesState) -> str:
        return END if desk.outcome is not None or len(state["messages"]) >= MAX_MESSAGES else "think"

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_conditional_edges("tools", is_over)
    return graph.compile()


async def answer_question(scenario: Scenario) -> art.Trajectory:
    desk = open_desk(scenario.inputs["mailbox"], scenario.seed)
    assert desk.wanted is not None
    opening = [
        SystemMessage(f"Answer from the mailbox. If it is not there: {NO_IDEA}"),
        HumanMessage(question_about(desk.wanted)),
    ]
    await build_agent(desk).ainvoke({"messages": opening})
    outcome = desk.outcome or "no_answer"
    reward = OUTCOMES[outcome] + FOUND_BONUS * desk.found + READ_BONUS * desk.read
    return art.Trajectory(reward=reward, metrics={"correct": float(outcome == "correct")})


async def rollout(model: art.TrainableModel, scenario: Scenario) -> art.Trajectory:
    return await wrap_rollout(model, answer_question)(scenario)  # was: answer_question(scenario)
