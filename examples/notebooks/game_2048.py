# %% [markdown]
# # 2048: a long game with a delayed reward
#
# You will see a model learn to play 2048: slide the tiles, merge equal ones, reach the goal before the board is stuck.
# The reward comes at the end of a game, by the highest tile and the points. It takes about three minutes on a laptop,
# without a GPU and without network.
#
# Nobody tells the model which move was good. It plays the same game several times, and the better rollouts show it.

# %%
# %pip install 'agent-reinforcement-trainer[local,notebooks]'

# %%
from collections import Counter

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
OPTIONS = {}  # of the task, such as {"size": 3, "goal": 64}; a tiny model gets a smaller form of the task
BACKEND = art.LocalBackend(path="runs/game_2048")  # trains on this machine
# BACKEND = art.RemoteBackend("http://gpu-machine:5000", api_key="...")  # or a server that can load the base model
NAME = "player-001"  # a name that exists is trained further; take another to begin again
GAMES = 200  # held-out games, before and after

# %% [markdown]
# ## The task
#
# `game_2048` is the full game on 4 x 4 cells. The smaller form for tiny models is played on a smaller board, with one
# letter for each tile and for each move.
#
# What a move depends on is the board alone. So a request shows the current board only, and the earlier turns are
# further conversations of the same trajectory; all of them get the reward of the game.

# %%
task = art.get_task("game_2048", OPTIONS, is_tiny=BASE_MODEL == "tiny")
print(task.options)

# %% [markdown]
# The tiny model has 0.1 million parameters and begins with random weights. In its warm start it reads games of
# scripted players who make a good move in half of the turns, and any legal one otherwise. A pretrained model needs no
# warm start.

# %%
if BASE_MODEL == "tiny":
    BASE_MODEL = str(build_tiny_model("runs/game_2048_tiny", task=task))
defaults = task.defaults.for_base_model(BASE_MODEL)  # the learning rate, and sizes that suit the task

# %% [markdown]
# ## Start, and play held-out games before the training

# %%
model = art.TrainableModel(name=NAME, project="game-2048", base_model=BASE_MODEL)
await model.register(BACKEND)
held_out = task.scenarios("test", seed=0, count=GAMES)


async def play(step: int) -> list[art.Trajectory]:
    """Play the held-out games with the checkpoint of a step. Step 0 is the untrained model."""
    return await art.gather_trajectories((task.rollout(model, s, step=step) for s in held_out), pbar_desc=None)


def wins(rollouts: list[art.Trajectory]) -> list[float]:
    return [trajectory.metrics["goal"] for trajectory in rollouts]


before = await play(step=0)
print(f"goal reached before training: {sum(wins(before)) / len(before):.0%}")

# %% [markdown]
# ## Train
#
# Each game is played several times, with the same new tiles for the same moves. Rollouts that earned more than the
# mean of their game become more likely. Sizes and the learning rate are those of the task, which `art train game_2048`
# uses too.

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
    print(f"step {step.number:>3}  mean reward {step.reward:+.3f}  goal reached {shares[step.number]:.0%}")

# %% [markdown]
# ## What was learnt

# %%
last = await model.get_step()
after = await play(step=last)

figure, axes = plt.subplots(figsize=(8, 4.5))
plot_learning(
    axes, shares, held_out={0: wins(before), last: wins(after)}, measure="goal reached", title="2048, smaller form"
)

# %% [markdown]
# The reward of each held-out game, from 0 to 1, or -0.5 if an answer was no move:

# %%
rewards = {"before": [game.reward for game in before], "after": [game.reward for game in after]}
figure, axes = plt.subplots(figsize=(8, 2.2))
plot_scores(axes, rewards, measure="reward of a game")

# %% [markdown]
# The highest tile of each game:

# %%
for name, games in (("before", before), ("after", after)):
    tiles = Counter(2 ** int(game.metrics["log2_highest_tile"]) for game in games)
    print(f"{name:<7}", ", ".join(f"tile {tile}: {count}" for tile, count in sorted(tiles.items())))

# %% [markdown]
# The first held-out game that missed the goal before the training and reached it after it:

# %%
pairs = list(zip(before, after, strict=True))
pair = next((pair for pair in pairs if pair[1].metrics["goal"] > pair[0].metrics["goal"]), pairs[0])
table = Table("before", "after")
table.add_row(*(Text(task.render_trajectory(trajectory)) for trajectory in pair))
table

# %%
await BACKEND.close()

# %% [markdown]
# ## Your own agent, and a real model
#
# - **Long games.** Put what the next move depends on into the last message, and earlier turns into
#   `trajectory.additional_histories`.
# - **In one command.** `art train game_2048 --held-out 400`.
# - **Model.** On a machine with a GPU set `BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"`: the full game is played to 2048
#   on 4 x 4 cells, with moves as XML. A lower goal makes shorter
#   games: `OPTIONS = {"goal": 128}`. `art doctor MODEL --task game_2048` says before the training whether the model
#   fits and how long a step takes.
