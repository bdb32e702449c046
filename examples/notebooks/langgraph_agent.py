# %% [markdown]
# # LangGraph: train an agent by changing two lines
#
# You will see an ordinary LangGraph agent, with a graph, a tool node and two tools, learn to send support tickets to
# the right team. It takes two to three minutes on a laptop, without a GPU and without network.
#
# The agent stays as it is. ART gives it a chat model that records what was sampled, and runs it once per ticket.

# %%
# %pip install 'agent-reinforcement-trainer[local,notebooks,langgraph]'

# %%
import json
import random
from typing import Any

import matplotlib.pyplot as plt
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from rich.table import Table
from rich.text import Text

import art
from art.langgraph import init_chat_model, wrap_rollout
from art.recipes.pictures import plot_learning
from art.task import Conversation, describe_messages
from art.testing.tiny_model import build_tiny_model

# %% [markdown]
# ## What to train, and where
#
# This is the only cell to change for another model or another machine.

# %% tags=["parameters"]
BASE_MODEL = "tiny"  # made below; with a GPU e.g. "Qwen/Qwen2.5-7B-Instruct"
BACKEND = art.LocalBackend(path="runs/langgraph_agent")  # trains on this machine
# BACKEND = art.RemoteBackend("http://gpu-machine:5000", api_key="...")  # or a server that can load the base model
NAME = "desk-001"  # a name that exists is trained further; take another to begin again
WARM_START_STEPS = 150  # only for the tiny model
STEPS = 20
TICKETS = 100  # held-out tickets, before and after
LEARNING_RATE = 2e-3  # for a tiny model; 1e-5 for a pretrained one

# %% [markdown]
# ## The tickets
#
# A ticket is a greeting and a complaint. A third of the combinations is held out: the agent never trains on them.

# %%
GREETINGS = ["Hello.", "Good morning.", "Please help.", "Hi there.", "Dear team.", "Urgent."]
COMPLAINTS = {
    "My invoice is wrong.": "billing", "I paid twice.": "billing", "The price has changed.": "billing",
    "It does not start.": "repairs", "The screen is dark.": "repairs", "It makes a noise.": "repairs",
    "I want one more.": "sales", "Do you have red ones?": "sales", "Which size fits me?": "sales",
}  # fmt: skip
TEAMS = ["billing", "repairs", "sales"]
PAIRS = [(i + j, f"{hello} {said}") for i, hello in enumerate(GREETINGS) for j, said in enumerate(COMPLAINTS)]
HELD_OUT = [text for number, text in PAIRS if number % 3 == 0]
TRAIN = [text for number, text in PAIRS if number % 3]


def team_of(ticket: str) -> str:
    return next(team for complaint, team in COMPLAINTS.items() if ticket.endswith(complaint))


# %% [markdown]
# ## The agent
#
# This is what you have already. The first of the two changed lines is that `init_chat_model` comes from
# `art.langgraph` and not from `langchain.chat_models`.


# %%
class Desk:
    """A ticket, and the team that it was sent to."""

    def __init__(self, ticket: str) -> None:
        self.ticket, self.sent_to = ticket, None

    def tools(self) -> list[Any]:
        @tool
        def read_ticket() -> str:
            """Read the ticket."""
            return self.ticket

        @tool
        def send_to(team: str) -> str:
            """Send it to billing, repairs or sales."""
            if team not in TEAMS:
                return f"there is no team {team}"
            self.sent_to = team
            return "sent"

        return [read_ticket, send_to]


def build_agent(desk: Desk) -> Any:
    chat = init_chat_model("gpt-4.1", max_tokens=80).bind_tools(desk.tools())

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    def is_over(state: MessagesState) -> str:
        return END if desk.sent_to or len(state["messages"]) >= 9 else "think"

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode(desk.tools()))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_conditional_edges("tools", is_over)
    return graph.compile()


# %% [markdown]
# ## The reward
#
# A rollout runs the agent on one ticket. Its reward is 1 for the right team, and -0.25 for a wrong one or none. The
# second changed line is `wrap_rollout`: inside it, the agent talks to the model that is trained, and its messages
# become the trajectory.


# %%
async def handle(ticket: str) -> art.Trajectory:
    desk = Desk(ticket)
    await build_agent(desk).ainvoke({"messages": [("user", "A ticket came in.")]})
    is_right = desk.sent_to == team_of(ticket)
    return art.Trajectory(reward=1.0 if is_right else -0.25, metrics={"right": float(is_right)})


async def rollout(model: art.TrainableModel, ticket: str) -> art.Trajectory:
    return await wrap_rollout(model, handle)(ticket)


# %% [markdown]
# ## A tiny model that knows the tools
#
# A pretrained model knows how to call a tool. The tiny one has 0.1 million parameters and random weights, so it first
# reads conversations of beginners: they know the form of the calls, read the ticket in half of the cases, and then
# know the team in half of the cases.


# %%
def beginner(rng: random.Random) -> Conversation:
    ticket, messages = rng.choice(TRAIN), [{"role": "user", "content": "A ticket came in."}]

    def call(name: str, **arguments: str) -> None:
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls = [{"id": "call_0", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})

    has_read = rng.random() < 0.5
    if has_read:
        call("read_ticket")
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": ticket})
    call("send_to", team=team_of(ticket) if has_read and rng.random() < 0.5 else rng.choice(TEAMS))
    return Conversation(messages=messages, tools=[convert_to_openai_tool(tool) for tool in Desk("").tools()])


if BASE_MODEL == "tiny":
    rng = random.Random(0)
    play = [beginner(rng) for _ in range(1000)]
    BASE_MODEL = str(
        build_tiny_model("runs/langgraph_agent_tiny", conversations=play, warm_start_steps=WARM_START_STEPS)
    )

# %% [markdown]
# ## Start, and test the agent before the training

# %%
model = art.TrainableModel(name=NAME, project="langgraph", base_model=BASE_MODEL)
await model.register(BACKEND)
tests = [HELD_OUT[i % len(HELD_OUT)] for i in range(TICKETS)]


async def test() -> list[art.Trajectory]:
    return await art.gather_trajectories((rollout(model, ticket) for ticket in tests), pbar_desc=None)


before = await test()
print(f"right team before training: {sum(t.metrics['right'] for t in before) / TICKETS:.0%}")

# %% [markdown]
# ## Train
#
# In each step the agent handles 8 tickets, 8 times each. What was better than the mean of its ticket becomes more
# likely.

# %%
pipeline = art.pipeline(model, scenarios=TRAIN, rollout=rollout, groups_per_step=8, rollouts_per_group=8)
right = {}
async for step in pipeline.train(STEPS, learning_rate=LEARNING_RATE):
    rollouts = [trajectory for group in step.groups for trajectory in group]
    right[step.number] = sum(t.metrics["right"] for t in rollouts) / len(rollouts)
    print(f"step {step.number:>3}  mean reward {step.reward:+.3f}  right team {right[step.number]:.0%}")

# %% [markdown]
# ## What was learnt

# %%
after = await test()

figure, axes = plt.subplots(figsize=(8, 4))
held_out = {0: [t.metrics["right"] for t in before], STEPS: [t.metrics["right"] for t in after]}
plot_learning(axes, right, held_out=held_out, measure="sent to the right team", title="A LangGraph agent")

# %% [markdown]
# The first held-out ticket that went to a wrong team before the training and to the right one after it:

# %%
pairs = [pair for pair in zip(before, after, strict=True) if pair[1].reward > pair[0].reward] or [(before[0], after[0])]
table = Table("before", "after")
table.add_row(*(Text("\n".join(describe_messages(rollout.messages()))) for rollout in pairs[0]))
table

# %%
for name, rollouts in (("before", before), ("after", after)):
    reads = sum("read_ticket" in str(t.messages()) for t in rollouts) / TICKETS
    print(f"{name:<7} the agent reads the ticket in {reads:.0%} of its rollouts")

# %%
await BACKEND.close()

# %% [markdown]
# ## Your own agent, and a real model
#
# - **Agent.** Keep your graph. Take `init_chat_model` from `art.langgraph`, and run the graph inside `wrap_rollout`.
#   Other libraries work too: OpenAI's Agents SDK, pydantic-ai and litellm, see
#   [docs/integrations.md](../../docs/integrations.md).
# - **Reward.** Set it where you know how it went: after `ainvoke`, from the state of the world (`desk.sent_to`).
# - **Model.** On a machine with a GPU set `BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"` or another model that calls tools,
#   and `LEARNING_RATE = 1e-5`. It needs no warm start. `art doctor MODEL` says before the training whether it fits.
