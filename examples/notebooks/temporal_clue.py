# %% [markdown]
# # Temporal Clue: deduction in one answer
#
# You will see a model learn to solve murder cases: who was it, where, when, with what and why? Each case is made by a
# generator, and a solver has proved that exactly one solution follows from the clues. It takes about three minutes on
# a laptop, without a GPU and without network.
#
# The model answers all questions of a case in one message. Each right answer counts, so a case that is half solved
# teaches something too.

# %%
# %pip install 'agent-reinforcement-trainer[local,notebooks]'

# %%
import matplotlib.pyplot as plt
from rich.table import Table
from rich.text import Text

import art
from art.recipes.pictures import plot_learning, plot_scores
from art.testing.tiny_model import build_tiny_model

# %% [markdown]
# ## What to train, and where
#
# This is the only cell to change for another model or another machine.

# %% tags=["parameters"]
BASE_MODEL = "tiny"  # made below; with a GPU e.g. "Qwen/Qwen2.5-7B-Instruct"
OPTIONS = {}  # of the task, such as {"suspects": 3}; a tiny model gets a smaller form of the task
BACKEND = art.LocalBackend(path="runs/temporal_clue")  # trains on this machine
# BACKEND = art.RemoteBackend("http://gpu-machine:5000", api_key="...")  # or a server that can load the base model
NAME = "detective-001"  # a name that exists is trained further; take another to begin again
CASES = 200  # held-out cases, before and after

# %% [markdown]
# ## The task
#
# `temporal_clue` has the generator, the solver and the reward. The smaller form for tiny models has cases of one hour
# with three suspects and short clues: who was in which room, and who was with whom.

# %%
task = art.get_task("temporal_clue", OPTIONS, is_tiny=BASE_MODEL == "tiny")
print(task.options)

# %% [markdown]
# The tiny model has 0.1 million parameters and begins with random weights. In its warm start it reads cases of
# scripted detectives who are right in most questions, and guess the others. A pretrained model needs no warm start.

# %%
if BASE_MODEL == "tiny":
    BASE_MODEL = str(build_tiny_model("runs/temporal_clue_tiny", task=task))
defaults = task.defaults.for_base_model(BASE_MODEL)  # the learning rate, and sizes that suit the task

# %% [markdown]
# ## Start, and solve held-out cases before the training

# %%
model = art.TrainableModel(name=NAME, project="temporal-clue", base_model=BASE_MODEL)
await model.register(BACKEND)
held_out = task.scenarios("test", seed=0, count=CASES)


async def investigate(step: int) -> list[art.Trajectory]:
    """Solve the held-out cases with the checkpoint of a step. Step 0 is the untrained model."""
    return await art.gather_trajectories((task.rollout(model, s, step=step) for s in held_out), pbar_desc=None)


def solved(rollouts: list[art.Trajectory]) -> list[float]:
    return [trajectory.metrics["solved"] for trajectory in rollouts]


before = await investigate(step=0)
print(f"cases solved before training: {sum(solved(before)) / len(before):.0%}")

# %% [markdown]
# ## Train
#
# Each case is answered several times, and answers that are better than the mean of their case become more likely.
# Sizes and the learning rate are those of the task, which `art train temporal_clue` uses too.

# %%
pipeline = art.pipeline(
    model,
    scenarios=task.scenarios("train", seed=0, count=defaults.groups_per_step * defaults.num_steps),
    rollout=task.rollout,
    groups_per_step=defaults.groups_per_step,
    rollouts_per_group=defaults.rollouts_per_group,
    max_staleness=0,
)
config = art.TrainConfig(
    learning_rate=defaults.rate_schedule(defaults.num_steps), num_minibatches=defaults.num_minibatches
)
shares = {}
async for step in pipeline.train(defaults.num_steps, config):
    rollouts = [trajectory for group in step.groups for trajectory in group]
    shares[step.number] = sum(solved(rollouts)) / len(rollouts)
    print(f"step {step.number:>3}  mean reward {step.reward:+.3f}  cases solved {shares[step.number]:.0%}")

# %% [markdown]
# ## What was learnt

# %%
last = await model.get_step()
after = await investigate(step=last)

figure, axes = plt.subplots(figsize=(8, 4.5))
plot_learning(
    axes,
    shares,
    held_out={0: solved(before), last: solved(after)},
    measure="cases solved",
    title="Murder cases, all questions right",
)

# %% [markdown]
# The share of right answers in each held-out case:

# %%
accuracy = {
    "before": [case.metrics["accuracy"] for case in before],
    "after": [case.metrics["accuracy"] for case in after],
}
figure, axes = plt.subplots(figsize=(8, 2.2))
plot_scores(axes, accuracy, measure="share of right answers in a case")

# %% [markdown]
# The first held-out case that was not solved before the training and was solved after it:

# %%
pairs = list(zip(before, after, strict=True))
pair = next((pair for pair in pairs if pair[1].metrics["solved"] > pair[0].metrics["solved"]), pairs[0])
table = Table("before", "after")
table.add_row(*(Text(task.render_trajectory(trajectory)) for trajectory in pair))
table

# %%
await BACKEND.close()

# %% [markdown]
# ## Your own agent, and a real model
#
# - **Puzzles.** `OPTIONS` choose the size of a case and the kinds of clues;
#   [docs/tasks.md](../../docs/tasks.md) has the page of the task. For puzzles of your own, write a task whose reward
#   counts right answers.
# - **In one command.** `art train temporal_clue --held-out 400`.
# - **Model.** On a machine with a GPU set `BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"`: the full form has four suspects,
#   rooms, hours, weapons and motives, and a model may think before it answers. `art doctor MODEL --task temporal_clue`
#   says before the training whether the model fits and how long a step takes.
