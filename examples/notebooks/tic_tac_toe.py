# %% [markdown]
# # Tic-tac-toe: a game of several turns
#
# You will see a model learn to win at tic-tac-toe against an opponent that moves at random. At first it knows the form
# of a move and wins about half of its games. After the training it wins most of them. It takes two to three minutes on
# a laptop, without a GPU and without network.
#
# The reward comes at the end of a game, after three to five moves, and nobody tells the model which move was good.

# %%
# %pip install 'agent-reinforcement-trainer[local,notebooks]'

# %%
import random

import matplotlib.pyplot as plt
from rich.table import Table
from rich.text import Text

import art
from art.recipes.pictures import plot_learning
from art.task import derive_seed
from art.tasks.tic_tac_toe import Board, parse_move, play_round
from art.testing.tiny_model import build_tiny_model

# %% [markdown]
# ## What to train, and where
#
# This is the only cell to change for another model or another machine.

# %% tags=["parameters"]
BASE_MODEL = "tiny"  # made below; with a GPU e.g. "Qwen/Qwen2.5-7B-Instruct"
BACKEND = art.LocalBackend(path="runs/tic_tac_toe")  # trains on this machine
# BACKEND = art.RemoteBackend("http://gpu-machine:5000", api_key="...")  # or a server that can load the base model
NAME = "player-001"  # a name that exists is trained further; take another to begin again
WARM_START_STEPS = 200  # only for the tiny model
STEPS = 40
GAMES = 200  # held-out games, before and after
LEARNING_RATE = 3e-3  # for a tiny model; 1e-5 for a pretrained one

# %% [markdown]
# The tiny model has 0.1 million parameters and begins with random weights. In its warm start it reads games of
# scripted players, good and bad ones, so that it knows what a move looks like. A pretrained model needs no warm start.

# %%
if BASE_MODEL == "tiny":
    folder = "runs/tic_tac_toe_tiny"
    BASE_MODEL = str(build_tiny_model(folder, task="tic_tac_toe", warm_start_steps=WARM_START_STEPS))

# %% [markdown]
# ## The agent
#
# The model sees the board, in which free cells show their number, and answers with a number. The rollout plays one
# game to its end. Its reward is 1 for a win, 0.5 for a draw, 0 for a loss and -0.5 for an answer that is no legal
# move: if breaking the rules were no worse than losing, a player who is about to lose would have no reason to keep to
# them.

# %%
RULES = "You play X. Answer with the number of a free cell."
REWARDS = {"win": 1.0, "draw": 0.5, "loss": 0.0, "invalid_move": -0.5}


async def rollout(
    model: art.TrainableModel, game: str, rollout_index: int = 0, step: int | None = None
) -> art.Trajectory:
    opponent = random.Random(derive_seed(game, rollout_index))  # another one in each rollout of a group
    trajectory = art.Trajectory(messages_and_choices=[{"role": "system", "content": RULES}], reward=0.0)
    board, outcome = Board(), None
    while outcome is None:
        trajectory.messages_and_choices.append({"role": "user", "content": str(board)})
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(step), messages=trajectory.messages(), max_completion_tokens=4
        )
        trajectory.messages_and_choices.append(completion.choices[0])
        cell = parse_move(completion.choices[0].message.content, board)
        outcome = "invalid_move" if cell is None else play_round(board, cell, opponent)
    trajectory.reward = REWARDS[outcome]
    trajectory.metrics |= {name: float(name == outcome) for name in REWARDS}
    trajectory.metadata["outcome_of_game"] = outcome
    return trajectory


# %% [markdown]
# ## Start, and play held-out games before the training

# %%
model = art.TrainableModel(name=NAME, project="tic-tac-toe", base_model=BASE_MODEL)
await model.register(BACKEND)


async def play(step: int) -> list[art.Trajectory]:
    """Play the held-out games with the checkpoint of a step. Step 0 is the untrained model."""
    return await art.gather_trajectories(
        (rollout(model, f"held out {i}", step=step) for i in range(GAMES)), pbar_desc=None
    )


before = await play(step=0)
print(f"won before training: {sum(game.metrics['win'] for game in before) / GAMES:.0%}")

# %% [markdown]
# ## Train
#
# `art.pipeline` plays 16 games 8 times each, trains on them, and goes on with the new checkpoint. The 8 rollouts of a
# game are compared with each other: what was better than their mean becomes more likely. The learning rate falls to
# nearly 0 over the run.

# %%
pipeline = art.pipeline(
    model, scenarios=lambda i: f"training {i}", rollout=rollout, groups_per_step=16, rollouts_per_group=8
)
rate = art.config.ScheduleConfig(peak=LEARNING_RATE, total_steps=STEPS)
wins = {}
async for step in pipeline.train(STEPS, art.TrainConfig(learning_rate=rate, num_minibatches=4)):
    games = [game for group in step.groups for game in group]
    wins[step.number] = sum(game.metrics["win"] for game in games) / len(games)
    print(f"step {step.number:>3}  mean reward {step.reward:+.3f}  won {wins[step.number]:.0%}")

# %% [markdown]
# ## What was learnt

# %%
after = await play(step=await model.get_step())

figure, axes = plt.subplots(figsize=(8, 4.5))
held_out = {0: [game.metrics["win"] for game in before], STEPS: [game.metrics["win"] for game in after]}
plot_learning(axes, wins, held_out=held_out, measure="games won", title="Tic-tac-toe against random moves")

# %% [markdown]
# How the games ended:

# %%
for name in REWARDS:
    first, last = (sum(game.metrics[name] for game in games) / GAMES for games in (before, after))
    print(f"{name:<13} {first:6.1%} -> {last:6.1%}")

# %% [markdown]
# The first held-out game that ended better after the training than before:

# %%
pairs = [pair for pair in zip(before, after, strict=True) if pair[1].reward > pair[0].reward] or [(before[0], after[0])]


def show(game: art.Trajectory) -> str:
    messages = [message for message in game.messages() if message["role"] != "system"]
    lines = [f"-> {m['content']}\n" if m["role"] == "assistant" else m["content"] for m in messages]
    return "\n".join([*lines, str(game.metadata["outcome_of_game"])])


table = Table("before", "after")
table.add_row(*(Text(show(game)) for game in pairs[0]))
table

# %%
await BACKEND.close()

# %% [markdown]
# ## Your own agent, and a real model
#
# - **Game.** Replace the body of `rollout`: show what your agent needs to see, append each `choice`, set the reward at
#   the end. Rollouts of one group must differ, by the opponent or by sampling, or there is nothing to compare.
# - **In one command.** `art train tic_tac_toe --held-out 400` runs the ready task that this notebook is made from.
# - **Model.** On a machine with a GPU set `BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"`, `LEARNING_RATE = 1e-5` and a
#   `max_completion_tokens` that leaves room for thinking. `art doctor MODEL --task tic_tac_toe` says before the
#   training whether it fits and how long a step takes.
