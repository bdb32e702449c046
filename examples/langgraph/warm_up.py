"""The warm start of a tiny model before `train.py`: conversations of beginners who know the form of every call.

    art tiny-model ./tiny --task warm_up:Support

They read the ticket in half of the cases, and then send it to the right team more often than not. Otherwise they send
it to a random team. A larger model does not need this.
"""

import json
import random
from typing import Any

from agent import COMPLAINTS, Desk, Ticket, draw_tickets, rollout
from langchain_core.utils.function_calling import convert_to_openai_tool

import art
from art.task import Conversation, Scenario, Split, Task, TaskDefaults

SKILL = 0.5
"""Probability that a player who has read the ticket knows the team; otherwise the team is random."""


class Support(Task):
    name = "support_tickets"
    description = "send support tickets to the right team, as a LangGraph agent"
    headline_metric = "right"
    defaults = TaskDefaults(groups_per_step=12, warm_start_steps=150)

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        tickets = draw_tickets(split, seed=seed, count=count)
        return [self.scenario(split, seed, index, ticket._asdict()) for index, ticket in enumerate(tickets)]

    async def rollout(
        self, model: Any, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> art.Trajectory:
        return await rollout(model, Ticket(**scenario.inputs))

    def warm_start_conversations(self, rng: random.Random, count: int) -> list[Conversation]:
        tickets = draw_tickets("train", seed=rng.randrange(2**31), count=count)
        tools = [convert_to_openai_tool(tool) for tool in Desk(tickets[0]).tools()]
        return [Conversation(messages=_play(rng, ticket), tools=tools) for ticket in tickets]


def _play(rng: random.Random, ticket: Ticket) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": "A ticket came in."}]
    knows = False
    if rng.random() < 0.5:
        messages += [_call("read_ticket"), {"role": "tool", "tool_call_id": "call_0", "content": ticket.text}]
        knows = rng.random() < SKILL
    messages.append(_call("send_to", team=ticket.team if knows else rng.choice(list(COMPLAINTS))))
    return messages


def _call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call_0", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
