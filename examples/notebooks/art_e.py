# %% [markdown]
# # ART-E: an agent that searches a mailbox, rewarded by RULER
#
# You will see a model learn to answer questions about a mailbox: it searches, reads an email, answers, and names its
# source. Nobody tells it the right answers. A judge compares the rollouts of each question (RULER), and its scores are
# the only reward. It takes about four minutes on a laptop, without a GPU and without network.
#
# Without network there is no language model to judge. A script stands in for it here, over the same protocol, with the
# errors that judges make. One cell says what to set for a real one.

# %%
# %pip install 'agent-reinforcement-trainer[local,notebooks]'

# %%
import logging
from contextlib import ExitStack

import matplotlib.pyplot as plt
from rich.table import Table
from rich.text import Text

import art
from art.recipes.pictures import plot_learning, plot_scores
from art.rewards import GroupScorer, Ruler
from art.testing.judge import ScriptedJudge, grade_messages
from art.testing.tiny_model import build_tiny_model

# %% [markdown]
# ## What to train, and where
#
# This is the only cell to change for another model or another machine.

# %% tags=["parameters"]
BASE_MODEL = "tiny"  # made below; with a GPU e.g. "Qwen/Qwen2.5-14B-Instruct"
OPTIONS = {}  # of the task, such as {"size": 500}; a tiny model gets a smaller form of the task
BACKEND = art.LocalBackend(path="runs/art_e")  # trains on this machine
# BACKEND = art.RemoteBackend("http://gpu-machine:5000", api_key="...")  # or a server that can load the base model
NAME = "mail-agent-001"  # a name that exists is trained further; take another to begin again
QUESTIONS = 150  # held-out questions, before and after

# %% [markdown]
# ## The task
#
# `mail_search` has mailboxes, questions whose answers are known, and a rollout with three tools: `search_emails`,
# `read_email` and `return_final_answer`. It also has a reward of its own. This notebook uses that reward only to see
# how well the judge does.

# %%
task = art.get_task("mail_search", OPTIONS, is_tiny=BASE_MODEL == "tiny")
for scenario in task.scenarios("train", seed=0, count=3):
    print(scenario.inputs["question"]["text"])

# %% [markdown]
# The tiny model has 0.1 million parameters and begins with random weights. In its warm start it reads rollouts of
# players who know the form of every call and take the right step in seven of ten cases. A pretrained model needs no
# warm start.

# %%
if BASE_MODEL == "tiny":
    BASE_MODEL = str(build_tiny_model("runs/art_e_tiny", task=task))
defaults = task.defaults.for_base_model(BASE_MODEL)  # the learning rate, and sizes that suit the task

# %% [markdown]
# ## The judge
#
# The judge gets all rollouts of a question at once and a rubric in prose. It scores each from 0 to 1. The script
# behind it looks at the transcript: was an email read that states the answer, and was it named? Then it errs, by 0.1
# on average, and favours the rollout that it is shown first.

# %%
judge = ScriptedJudge(grade_messages(task.score_messages), noise=0.1, position_bias=0.05)
servers = ExitStack()  # it answers on a port of this machine until the last cell
servers.enter_context(judge)
ruler = Ruler("openai/judge", rubric=task.rubric, extra_litellm_params={"base_url": judge.base_url, "api_key": "none"})
# With a real model: ruler = Ruler("openai/o3", rubric=task.rubric), which reads OPENAI_API_KEY
logging.getLogger("art.rewards").setLevel(logging.ERROR)  # it would say of each group that its rollouts are equal
print(task.rubric)

# %% [markdown]
# ## Start, and answer held-out questions before the training

# %%
model = art.TrainableModel(name=NAME, project="art-e", base_model=BASE_MODEL)
await model.register(BACKEND)
held_out = task.scenarios("test", seed=0, count=QUESTIONS)


async def answer(step: int) -> list[art.Trajectory]:
    """Answer the held-out questions with the checkpoint of a step. Step 0 is the untrained model."""
    return await art.gather_trajectories((task.rollout(model, s, step=step) for s in held_out), pbar_desc=None)


def correct(rollouts: list[art.Trajectory]) -> list[float]:
    return [trajectory.metrics["correct"] for trajectory in rollouts]


before = await answer(step=0)
print(f"answered correctly before training: {sum(correct(before)) / len(before):.0%}")

# %% [markdown]
# ## Train on the judge's scores
#
# `art.pipeline` runs each question several times. `after_each` gives every finished group to the judge, which sets the
# rewards. The reward of the task stays in `independent_reward`, which training does not use. The learning rate rises
# for four steps and then falls to nearly 0.

# %%
pipeline = art.pipeline(
    model,
    scenarios=task.scenarios("train", seed=0, count=defaults.groups_per_step * defaults.num_steps),
    rollout=task.rollout,
    after_each=GroupScorer(ruler),
    groups_per_step=defaults.groups_per_step,
    rollouts_per_group=defaults.rollouts_per_group,
    max_staleness=0,
)
config = art.TrainConfig(
    learning_rate=defaults.rate_schedule(defaults.num_steps), num_minibatches=defaults.num_minibatches
)
right, points = {}, []
async for step in pipeline.train(defaults.num_steps, config):
    rollouts = [trajectory for group in step.groups for trajectory in group]
    right[step.number] = sum(correct(rollouts)) / len(rollouts)
    points += [(trajectory.metrics["independent_reward"], trajectory.reward) for trajectory in rollouts]
    print(f"step {step.number:>3}  judge {step.reward:.3f}  correct {right[step.number]:.0%}")

# %% [markdown]
# ## What was learnt
#
# The share of correct answers, which nobody trained on:

# %%
last = await model.get_step()
after = await answer(step=last)

figure, axes = plt.subplots(figsize=(8, 4.5))
plot_learning(
    axes, right, held_out={0: correct(before), last: correct(after)}, measure="correct answers",
    title="Questions about a mailbox, rewarded by a judge",
)  # fmt: skip

# %% [markdown]
# ## What the judge said
#
# The judge's scores in training, by what the rollout was worth: the reward that the task would have given.

# %%
scores = {
    "wrong or none": [score for worth, score in points if worth < 0],
    '"I don\'t know"': [score for worth, score in points if 0 <= worth < 1],
    "correct": [score for worth, score in points if worth >= 1],
}
figure, axes = plt.subplots(figsize=(8, 2.8))
plot_scores(axes, {name: values[:400] for name, values in scores.items() if values})

# %% [markdown]
# The first held-out question that was answered wrongly before the training and correctly after it:

# %%
pairs = list(zip(before, after, strict=True))
pair = next((pair for pair in pairs if pair[1].metrics["correct"] > pair[0].metrics["correct"]), pairs[0])
table = Table("before", "after")
table.add_row(*(Text(task.render_trajectory(trajectory)) for trajectory in pair))
table

# %%
await BACKEND.close()
servers.close()

# %% [markdown]
# ## Your own agent, and a real model
#
# - **Task.** Write a rollout around your tools, and leave the reward at 0: the judge sets it. Its rubric says what a
#   good rollout looks like. [docs/rewards.md](../../docs/rewards.md) has other judges, sums of judges and functions,
#   and how to measure a judge.
# - **Mailbox.** A tiny model gets a short form. The full one has mailboxes with threads and corrections.
# - **In one command.** `art train mail_search --judge openai/o3 --held-out 200`.
# - **Model.** On a machine with a GPU set `BASE_MODEL = "Qwen/Qwen2.5-14B-Instruct"` or another model that calls
#   tools. `art doctor MODEL --task mail_search` says before the training whether it fits and how long a step takes.
