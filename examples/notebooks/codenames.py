# %% [markdown]
# # Codenames: two agents that learn to understand each other
#
# You will see two agents of one team learn to play a word game together. The spymaster sees which words of a board
# belong to the team and gives a clue; the guesser sees only the board and the clue. Both are the same model, and both
# learn from the result of the game. It takes about four minutes on a laptop, without a GPU and without network.
#
# At first the spymaster gives clues that say little, and the guesser guesses. A clue is only good if the guesser
# understands it, so each can get better only with the other.

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
OPTIONS = {}  # of the task, such as {"train": "guesser"}; a tiny model gets a smaller form of the task
BACKEND = art.LocalBackend(path="runs/codenames")  # trains on this machine
# BACKEND = art.RemoteBackend("http://gpu-machine:5000", api_key="...")  # or a server that can load the base model
NAME = "team-001"  # a name that exists is trained further; take another to begin again
GAMES = 200  # held-out games, before and after

# %% [markdown]
# ## The task
#
# `codenames` has boards, rules, and a scripted team as the opponent. A trajectory holds two conversations, that of the
# spymaster and, in `additional_histories`, that of the guesser. They share one reward, so that a good clue and a good
# guess are both reinforced.
#
# The smaller form for tiny models has 24 words of six themes, whose names are the clues: a tiny model knows no other
# words.

# %%
task = art.get_task("codenames", OPTIONS, is_tiny=BASE_MODEL == "tiny")
print(task.options)

# %% [markdown]
# The tiny model has 0.1 million parameters and begins with random weights. In its warm start it reads games of
# scripted players who connect a word with its theme in half of the cases. A pretrained model needs no warm start.

# %%
if BASE_MODEL == "tiny":
    BASE_MODEL = str(build_tiny_model("runs/codenames_tiny", task=task))
defaults = task.defaults.for_base_model(BASE_MODEL)  # the learning rate, and sizes that suit the task

# %% [markdown]
# ## Start, and play held-out games before the training

# %%
model = art.TrainableModel(name=NAME, project="codenames", base_model=BASE_MODEL)
await model.register(BACKEND)
held_out = task.scenarios("test", seed=0, count=GAMES)


async def play(step: int) -> list[art.Trajectory]:
    """Play the held-out games with the checkpoint of a step. Step 0 is the untrained model."""
    return await art.gather_trajectories((task.rollout(model, s, step=step) for s in held_out), pbar_desc=None)


def wins(rollouts: list[art.Trajectory]) -> list[float]:
    return [trajectory.metrics["win"] for trajectory in rollouts]


before = await play(step=0)
print(f"games won before training: {sum(wins(before)) / len(before):.0%}")

# %% [markdown]
# ## Train
#
# Each board is played several times, and what earned more than the mean of its board becomes more likely: in the clue
# as well as in the guesses. Sizes and the learning rate are those of the task, which `art train codenames` uses too.

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
    shares[step.number] = sum(wins(rollouts)) / len(rollouts)
    print(f"step {step.number:>3}  mean reward {step.reward:+.3f}  games won {shares[step.number]:.0%}")

# %% [markdown]
# ## What was learnt

# %%
last = await model.get_step()
after = await play(step=last)

figure, axes = plt.subplots(figsize=(8, 4.5))
plot_learning(
    axes,
    shares,
    held_out={0: wins(before), last: wins(after)},
    measure="games won",
    title="Codenames: a spymaster and a guesser of one model",
)

# %% [markdown]
# The share of own words that the guesser named, in games before and after:

# %%
found = {
    "before": [game.metrics["own_found"] for game in before],
    "after": [game.metrics["own_found"] for game in after],
}
figure, axes = plt.subplots(figsize=(8, 2.2))
plot_scores(axes, found, measure="share of own words that were found")

# %%
for name in ("win", "assassin", "invalid_clue", "invalid_guess"):
    first, later = (sum(game.metrics[name] for game in games) / GAMES for games in (before, after))
    print(f"{name:<14} {first:6.1%} -> {later:6.1%}")

# %% [markdown]
# The first held-out game that was lost before the training and won after it:

# %%
pairs = list(zip(before, after, strict=True))
pair = next((pair for pair in pairs if pair[1].metrics["win"] > pair[0].metrics["win"]), pairs[0])
table = Table("before", "after")
table.add_row(*(Text(task.render_trajectory(trajectory)) for trajectory in pair))
table

# %%
await BACKEND.close()

# %% [markdown]
# ## Your own agent, and a real model
#
# - **Two agents.** Put the conversation of a second agent into `trajectory.additional_histories`, and give the
#   trajectory one reward for both. With `OPTIONS = {"train": "guesser"}` only one role is trained, beside a scripted
#   partner.
# - **In one command.** `art train codenames --held-out 400`.
# - **Model.** On a machine with a GPU set `BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"`: the full game has 25 words, and
#   any word can be a clue. `art doctor MODEL --task codenames` says before the training whether the model fits and how
#   long a step takes.
