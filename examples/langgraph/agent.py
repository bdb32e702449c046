"""A LangGraph agent that sends support tickets to a team. The two lines with a comment are for ART."""

import random
from typing import Any, NamedTuple

from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import art
from art.langgraph import init_chat_model, wrap_rollout  # was: from langchain.chat_models import init_chat_model

GREETINGS = ["Hello.", "Good morning.", "Please help.", "Hi there.", "Dear team.", "Urgent."]
COMPLAINTS = {
    "billing": ["My invoice is wrong.", "I paid twice.", "The price has changed."],
    "repairs": ["It does not start.", "The screen is dark.", "It makes a noise."],
    "sales": ["I want one more.", "Do you have red ones?", "Which size fits me?"],
}
MAX_MESSAGES = 9


class Ticket(NamedTuple):
    text: str
    team: str


def all_tickets(split: str) -> list[Ticket]:
    """All pairs of greeting and complaint in a split. A third of them are in `test`, the others in `train`."""
    complaints = [(complaint, team) for team, texts in COMPLAINTS.items() for complaint in texts]
    return [
        Ticket(f"{greeting} {complaint}", team)
        for i, greeting in enumerate(GREETINGS)
        for j, (complaint, team) in enumerate(complaints)
        if ((i + j) % 3 == 0) == (split == "test")
    ]


def draw_tickets(split: str, *, seed: int, count: int) -> list[Ticket]:
    return random.Random(seed).choices(all_tickets(split), k=count)


class Desk:
    """A ticket, and the team that it was sent to."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.sent_to: str | None = None

    def tools(self) -> list[Any]:
        @tool
        def read_ticket() -> str:
            """Read the ticket."""
            return self.ticket.text

        @tool
        def send_to(team: str) -> str:
            """Send it to billing, repairs or sales."""
            if team not in COMPLAINTS:
                return f"there is no team {team}"
            self.sent_to = team
            return "sent"

        return [read_ticket, send_to]


def build_agent(desk: Desk) -> Any:
    chat = init_chat_model("gpt-4.1", max_tokens=80).bind_tools(desk.tools())

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    def is_over(state: MessagesState) -> str:
        return END if desk.sent_to is not None or len(state["messages"]) >= MAX_MESSAGES else "think"

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode(desk.tools()))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_conditional_edges("tools", is_over)
    return graph.compile()


async def handle_ticket(ticket: Ticket) -> art.Trajectory:
    desk = Desk(ticket)
    await build_agent(desk).ainvoke({"messages": [("user", "A ticket came in.")]})
    is_right = desk.sent_to == ticket.team
    return art.Trajectory(reward=1.0 if is_right else -0.25, metrics={"right": float(is_right)})


async def rollout(model: art.TrainableModel, ticket: Ticket) -> art.Trajectory:
    return await wrap_rollout(model, handle_ticket)(ticket)  # was: handle_ticket(ticket)
