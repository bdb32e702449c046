# %% [markdown]
# # MCP-RL: learn the tools of a server, without labels
#
# You will see a model learn to use the tools of an MCP server (Model Context Protocol). Nobody writes down right
# answers: a language model writes the questions from the server's list of tools, and a judge compares the rollouts. It
# takes about two minutes on a laptop, without a GPU and without network.
#
# Without network there is no language model to write and to judge. Two scripts stand in for them here, over the same
# protocol. The cell of the scripts says what to set for real ones.

# %%
# %pip install 'agent-reinforcement-trainer[local,notebooks,mcp]'

# %%
import json
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from rich.table import Table
from rich.text import Text

import art
from art.mcp import GeneratedScenario, MCPClient, complete_task_tool, generate_scenarios, mcp_rollout
from art.recipes.pictures import plot_learning, plot_scores
from art.rewards import GroupScorer, Ruler
from art.task import Conversation, describe_messages
from art.testing.judge import ScriptedJudge
from art.testing.tiny_model import build_tiny_model
from art_recipes.mcp.rollout import SYSTEM
from art_recipes.scripted_generator import ScriptedGenerator

# %% [markdown]
# ## What to train, and where
#
# This is the only cell to change for another model or another machine.

# %% tags=["parameters"]
BASE_MODEL = "tiny"  # made below; with a GPU e.g. "Qwen/Qwen2.5-7B-Instruct"
BACKEND = art.LocalBackend(path="runs/mcp_rl")  # trains on this machine
# BACKEND = art.RemoteBackend("http://gpu-machine:5000", api_key="...")  # or a server that can load the base model
SERVER = [sys.executable, "stock.py"]  # a command that starts an MCP server, or its address
NAME = "clerk-001"  # a name that exists is trained further; take another to begin again
WARM_START_STEPS = 400  # only for the tiny model
SCENARIOS = 44
STEPS = 20
LEARNING_RATE = 3e-3  # for a tiny model; 1e-5 for a pretrained one

# %% [markdown]
# ## The server
#
# Any MCP server will do. This one knows a shop's stock and has two tools. The cell writes it to a file.

# %%
STOCK = {"desk": (4, 120), "lamp": (40, 15), "chair": (22, 35), "shelf": (9, 60), "clock": (17, 25), "vase": (31, 12),
         "rug": (6, 80), "mirror": (13, 45)}  # fmt: skip
Path("stock.py").write_text(f'''\
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

STOCK = {STOCK}  # pieces and price
server = MCPServer("stock", instructions="The stock of a shop.")


def row(product: str) -> tuple[int, int]:
    if product not in STOCK:
        raise ToolError(f"there is no {{product}}")  # the agent reads this
    return STOCK[product]


@server.tool()
def count(product: str) -> str:
    """How many pieces of a product there are."""
    return str(row(product)[0])


@server.tool()
def price(product: str) -> str:
    """What one piece of a product costs."""
    return str(row(product)[1])


server.run("stdio")
''')
client = await MCPClient(SERVER).__aenter__()  # one process, which all rollouts share
offered = await client.list_tools()
for tool in offered:
    print(f"{tool.name}: {tool.description}")

# %% [markdown]
# ## The scripted generator and judge
#
# The generator asks about pieces and prices in several ways. The judge reads a rollout as a language model would: was
# the right tool called for the right product, and is the answer its result? It makes errors (`noise`).

# %%
ASKED = {
    "count": ["How many pieces of {} are left?", "Count each {} here.", "Is any {} in stock, and what number?"],
    "price": ["What does one {} cost?", "Tell me the price for a {}.", "How much money is a {}?"],
}
QUESTIONS = {text.format(p): (tool, p) for tool, texts in ASKED.items() for text in texts for p in STOCK}
TASKS = random.Random(0).sample(list(QUESTIONS), len(QUESTIONS))


def result_of(tool: str, product: str) -> str:
    return str(STOCK[product][tool == "price"])


def grade(trajectory: dict[str, Any]) -> tuple[float, str]:
    """Score a rollout from 0 to 1, and explain the score in a sentence."""
    messages = [*trajectory.get("context", []), *trajectory["messages"]]
    tool, product = QUESTIONS[messages[1]["content"]]
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    others = [call for call in calls if call["name"] != "complete_task"]
    asked = any(call["name"] == tool and f'"{product}"' in call["arguments"] for call in others)
    answers = [call["arguments"] for call in calls if call["name"] == "complete_task"]
    is_right = any(f'"{result_of(tool, product)}"' in answer for answer in answers)
    score = 0.05 + 0.45 * asked + 0.4 * is_right + 0.1 * bool(answers) - 0.1 * (len(others) - asked)
    done = "asked" if asked else "did not ask"
    return max(
        score, 0.0
    ), f"It {done} for the {tool} of the {product}; the answer is {'right' if is_right else 'wrong'}."


generator, judge = ScriptedGenerator(inputs=TASKS), ScriptedJudge(grade, noise=0.1)
servers = ExitStack()  # both answer on ports of this machine until the last cell
for server in (generator, judge):
    servers.enter_context(server)
WRITER = {"generator_model": "generator", "generator_base_url": generator.base_url, "generator_api_key": "none"}
ruler = Ruler("openai/judge", extra_litellm_params={"base_url": judge.base_url, "api_key": "none"})
# With real models: WRITER = {} and ruler = Ruler("openai/o3"), with the keys OPENROUTER_API_KEY and OPENAI_API_KEY

# %% [markdown]
# ## Scenarios from the list of tools

# %%
scenarios = await generate_scenarios(offered, num_scenarios=SCENARIOS, show_preview=False, **WRITER)
train, held_out = scenarios.split_by_hash(val_fraction=0.25)
print(f"{len(train)} scenarios to train on, {len(held_out)} held out")
scenarios.preview(3)

# %% [markdown]
# ## A tiny model that knows the form of a call
#
# A pretrained model can call tools. The tiny one has 0.1 million parameters and random weights, so it first reads
# rollouts of beginners: they know the form of every call, and often take the wrong tool or read the result wrongly.
# They are asked all questions; what is held out gives no reward in training.

# %%
TOOLS = [*(tool.to_tool_schema() for tool in offered), complete_task_tool]


def beginner(rng: random.Random) -> Conversation:
    question = rng.choice(TASKS)
    tool, product = QUESTIONS[question]
    tool = tool if rng.random() < 0.7 else rng.choice(["count", "price"])
    result = result_of(tool, product)
    answer = result if rng.random() < 0.6 else result_of("count", rng.choice(list(STOCK)))
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for name, arguments in ((tool, {"product": product}), ("complete_task", {"summary": answer})):
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls = [{"id": "call_0", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        if name == tool:
            messages.append({"role": "tool", "tool_call_id": "call_0", "content": result})
    return Conversation(messages=messages, tools=TOOLS)


if BASE_MODEL == "tiny":
    rng = random.Random(0)
    play = [beginner(rng) for _ in range(3000)]
    BASE_MODEL = str(build_tiny_model("runs/mcp_rl_tiny", conversations=play, warm_start_steps=WARM_START_STEPS))

# %% [markdown]
# ## Train on the judge's scores
#
# `mcp_rollout` tells the model the scenario and runs its calls until it says that it is done. `after_each` gives every
# finished group to the judge. Its scores are the only reward.

# %%
model = art.TrainableModel(name=NAME, project="mcp-rl", base_model=BASE_MODEL)
await model.register(BACKEND)


async def rollout(model: art.TrainableModel, scenario: GeneratedScenario, step: int | None = None) -> art.Trajectory:
    return await mcp_rollout(
        model, scenario, client, step=step, tools=offered, max_turns=4, request={"max_completion_tokens": 60}
    )


pipeline = art.pipeline(
    model, scenarios=list(train), rollout=rollout, after_each=GroupScorer(ruler), groups_per_step=8,
    rollouts_per_group=6,
)  # fmt: skip
scores = {}
async for step in pipeline.train(STEPS, learning_rate=LEARNING_RATE):
    scores[step.number] = step.reward
    print(f"step {step.number:>3}  mean score of the judge {step.reward:.3f}")

# %% [markdown]
# ## Before and after, judged together
#
# A judge that compares has no fixed scale: 0.6 means "good beside these others". So for each held-out scenario, the
# rollouts of the untrained and of the trained model are one group, and the judge is not told which is which.

# %%
last = await model.get_step()


async def rollout_of(scenario: GeneratedScenario, step: int) -> art.Trajectory:
    trajectory = await rollout(model, scenario, step)
    trajectory.metadata["step"] = step
    return trajectory


compared = await art.gather_trajectory_groups(
    (
        art.TrajectoryGroup(rollout_of(scenario, step) for step in (0, last) for _ in range(4))
        for scenario in held_out
    ),
    after_each=GroupScorer(ruler), pbar_desc=None,
)  # fmt: skip


def rollouts_at(step: int) -> list[art.Trajectory]:
    return [trajectory for group in compared for trajectory in group if trajectory.metadata["step"] == step]


before, after = ([trajectory.reward for trajectory in rollouts_at(step)] for step in (0, last))
figure, axes = plt.subplots(figsize=(8, 4))
plot_learning(axes, scores, held_out={0: before, last: after}, measure="judge's score", title="Tools of an MCP server")

# %%
figure, axes = plt.subplots(figsize=(8, 2.2))
plot_scores(axes, {"before": before, "after": after})

# %% [markdown]
# The held-out scenario that gained most, with the judge's score and words:

# %%
pairs = list(zip(rollouts_at(0), rollouts_at(last), strict=True))
pair = max(pairs, key=lambda pair: pair[1].reward - pair[0].reward)
table = Table("before", "after")
shown = ([*describe_messages(t.messages()[1:]), "", f"score {t.reward:.2f}", *map(str, t.logs)] for t in pair)
table.add_row(*(Text("\n".join(lines)) for lines in shown))
table

# %%
await BACKEND.close()
await client.__aexit__(None, None, None)
servers.close()

# %% [markdown]
# ## Your own server, and a real model
#
# - **Server.** Set `SERVER` to a command or an address, and leave out the cell that writes `stock.py`. Rollouts share
#   one process here, because its tools change nothing. Pass the command to `mcp_rollout` in place of `client` if they
#   do: then each rollout starts its own server, in the same state.
# - **In one command.** `art mcp-rl "python stock.py" --model MODEL --judge openai/o3` does all of this and writes a
#   report, see [docs/mcp.md](../../docs/mcp.md).
# - **Model.** On a machine with a GPU set `BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"` or another model that calls tools,
#   and `LEARNING_RATE = 1e-5`. It needs no warm start. `art doctor MODEL` says before the training whether it fits.
