# %% [markdown]
# # First imitate, then improve: SFT and RL
#
# You will see a model that answers at random learn in two stages. First it imitates a teacher who is right in four of
# five cases (supervised fine-tuning, SFT). Then it learns from rewards (RL), and becomes better than its teacher. It
# takes about a minute on a laptop, without a GPU and without network.
#
# Imitation is fast, and it stops at the level of the teacher. Rewards have no such limit, but they can only strengthen
# what the model already does sometimes. So the two go well together.

# %%
# %pip install 'agent-reinforcement-trainer[local,notebooks]'

# %%
import random

import matplotlib.pyplot as plt
from rich.table import Table
from rich.text import Text

import art
from art.recipes.pictures import plot_learning, plot_scores
from art.task import Conversation
from art.testing.tiny_model import build_tiny_model

# %% [markdown]
# ## What to train, and where
#
# This is the only cell to change for another model or another machine.

# %% tags=["parameters"]
BASE_MODEL = "tiny"  # made below; with a GPU e.g. "Qwen/Qwen2.5-7B-Instruct"
BACKEND = art.LocalBackend(path="runs/sft_then_rl")  # trains on this machine
# BACKEND = art.RemoteBackend("http://gpu-machine:5000", api_key="...")  # or a server that can load the base model
NAME = "pupil-001"  # a name that exists is trained further; take another to begin again
WARM_START_STEPS = 100  # only for the tiny model
LESSONS = 2000  # answers of the teacher
SFT_LEARNING_RATE = 5e-3  # for a tiny model; 5e-5 for a pretrained one
STEPS = 20  # of RL
LEARNING_RATE = 2e-3  # for a tiny model; 1e-5 for a pretrained one

# %% [markdown]
# ## The job
#
# The agent reads a message of a customer and names the desk that should answer it. A message is a greeting and a
# complaint. A quarter of the combinations is held out.

# %%
COMPLAINTS = {
    "billing": ["the invoice is wrong", "you charged me twice", "my payment was declined", "I need a receipt",
                "the discount is missing", "a fee was added"],
    "shipping": ["the courier lost my parcel", "tracking stands still", "nobody rang the bell", "I have moved",
                 "the driver left it in the rain", "delivery takes too long"],
    "returns": ["the zip broke", "these shoes are too small", "the lamp does not work", "two plates came in pieces",
                "the kettle leaks", "a seam has torn"],
}  # fmt: skip
GREETINGS = ["Hello,", "Good morning,", "Dear team,", "Listen,"]
DESKS = list(COMPLAINTS)
RIGHT = {f"{hello} {said}.": desk for desk, texts in COMPLAINTS.items() for said in texts for hello in GREETINGS}
HELD_OUT = [text for i, text in enumerate(RIGHT) if i % 4 == i // 4 % 4]  # each complaint with another greeting
TRAIN = [text for text in RIGHT if text not in HELD_OUT]


def conversation(message: str, answer: str) -> Conversation:
    roles = {"system": "Name the desk: billing, shipping or returns.", "user": message, "assistant": answer}
    return Conversation(messages=[{"role": role, "content": content} for role, content in roles.items()])


# %% [markdown]
# ## The base model, and the teacher
#
# The tiny model has 0.1 million parameters. In its warm start it reads answers that name any desk, or none: it knows
# the form of an answer, and hardly looks at the message (a warning says so; here it is meant). A pretrained model
# needs no warm start.
#
# The teacher is right in about four of five cases. In your own project, the teacher is a larger model, or people, and
# its conversations come from a file.

# %%
rng = random.Random(0)
if BASE_MODEL == "tiny":
    guesses = [
        conversation(text, RIGHT[text] if rng.random() < 0.1 else rng.choice([*DESKS, "sorry"]))
        for text in rng.choices(TRAIN, k=2000)
    ]
    folder = "runs/sft_then_rl_tiny"
    BASE_MODEL = str(build_tiny_model(folder, conversations=guesses, warm_start_steps=WARM_START_STEPS))

messages = rng.choices(TRAIN, k=LESSONS)
answers = [RIGHT[text] if rng.random() < 0.7 else rng.choice(DESKS) for text in messages]
teacher = sum(RIGHT[text] == answer for text, answer in zip(messages, answers, strict=True)) / LESSONS
print(f"the teacher is right in {teacher:.0%} of its answers")

# %% [markdown]
# ## The agent and its reward
#
# The right desk earns 1, another one 0, and an answer that is no desk -0.25.


# %%
async def rollout(model: art.TrainableModel, message: str, step: int | None = None) -> art.Trajectory:
    asked = conversation(message, "").messages[:2]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step), messages=asked, max_completion_tokens=16
    )
    choice = completion.choices[0]
    answer = (choice.message.content or "").strip()
    reward = 1.0 if answer == RIGHT[message] else 0.0 if answer in DESKS else -0.25
    return art.Trajectory(messages_and_choices=[*asked, choice], reward=reward, metrics={"right": float(reward == 1)})


# %% [markdown]
# ## Start, and test the base model on the held-out messages

# %%
model = art.TrainableModel(name=NAME, project="sft-then-rl", base_model=BASE_MODEL)
await model.register(BACKEND)


async def test(step: int) -> list[art.Trajectory]:
    """Answer every held-out message 10 times with the checkpoint of a step. Step 0 is the base model."""
    return await art.gather_trajectories((rollout(model, text, step) for text in HELD_OUT * 10), pbar_desc=None)


def right_of(rollouts: list[art.Trajectory]) -> list[float]:
    return [trajectory.metrics["right"] for trajectory in rollouts]


base = await test(step=0)
print(f"the base model is right in {sum(right_of(base)) / len(base):.0%}")

# %% [markdown]
# ## First stage: imitate
#
# `train_sft` takes trajectories and trains on what the assistant says in them. It makes one checkpoint, step 1.

# %%
if await model.get_step() == 0:
    lessons = [
        art.Trajectory(messages_and_choices=conversation(text, answer).messages, reward=0.0)
        for text, answer in zip(messages, answers, strict=True)
    ]
    await model.train_sft(lessons, learning_rate=SFT_LEARNING_RATE, batch_size=16)

imitated = await test(step=1)
print(f"after imitation it is right in {sum(right_of(imitated)) / len(imitated):.0%}, its teacher in {teacher:.0%}")

# %% [markdown]
# ## Second stage: improve
#
# Now the model answers 16 messages 8 times each in a step. Answers that earned more than the mean of their group
# become more likely. The teacher is not asked any more.

# %%
pipeline = art.pipeline(model, scenarios=TRAIN, rollout=rollout, groups_per_step=16, rollouts_per_group=8)
right = {}
async for step in pipeline.train(STEPS + 1, learning_rate=LEARNING_RATE):
    rollouts = [trajectory for group in step.groups for trajectory in group]
    right[step.number] = sum(right_of(rollouts)) / len(rollouts)
    print(f"step {step.number:>3}  mean reward {step.reward:+.3f}  right {right[step.number]:.0%}")

# %% [markdown]
# ## What each stage brought

# %%
improved = await test(step=await model.get_step())

figure, axes = plt.subplots(figsize=(8, 4.5))
stages = {0: right_of(base), 1: right_of(imitated), STEPS + 1: right_of(improved)}
axes.axhline(teacher, color="grey", linestyle="--", linewidth=1, label="teacher")
plot_learning(axes, right, held_out=stages, measure="right desk", title="Imitation (step 1), then rewards")

# %% [markdown]
# Each point is a held-out message, with the share of right answers in ten:

# %%
shares = {
    name: [sum(right_of(rollouts[i :: len(HELD_OUT)])) / 10 for i in range(len(HELD_OUT))]
    for name, rollouts in (("base", base), ("after SFT", imitated), ("after RL", improved))
}
figure, axes = plt.subplots(figsize=(8, 2.8))
plot_scores(axes, shares, measure="share of right answers to a held-out message")

# %% [markdown]
# Some held-out messages, with four answers of each stage:

# %%
table = Table("message", "base", "after SFT", "after RL")
for i, text in enumerate(HELD_OUT[::4]):
    said = [
        [t.messages()[-1]["content"] for t in stage[4 * i :: len(HELD_OUT)][:4]] for stage in (base, imitated, improved)
    ]
    table.add_row(text, *(Text("\n".join(answers)) for answers in said))
table

# %%
await BACKEND.close()

# %% [markdown]
# ## Your own agent, and a real model
#
# - **Lessons.** A trajectory for SFT is a list of messages. Write the conversations of a larger model to a file and
#   read them into `art.Trajectory(messages_and_choices=[...], reward=0.0)`. Tool calls are trained on as well: pass
#   `tools=`.
# - **How much SFT.** As little as gives the model a start: after long imitation all rollouts are alike, and then
#   rewards have nothing to choose from. Look at the first steps of RL: the rewards within a group should differ.
# - **Model.** On a machine with a GPU set `BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"`, `SFT_LEARNING_RATE = 5e-5` and
#   `LEARNING_RATE = 1e-5`. `art doctor MODEL` says before the training whether it fits.
