# %% [markdown]
# # AutoRL: an agent from one sentence
#
# You will see a model learn a job that is described in one sentence, without labels and without a data set. One
# language model writes inputs and instructions, the model that is trained answers them, and a judge compares the
# answers. It takes about a minute on a laptop, without a GPU and without network.
#
# Without network there is no language model to write and to judge. Two scripts stand in for them here, over the same
# protocol. One cell below says what to set for real ones.

# %%
# %pip install 'agent-reinforcement-trainer[local,notebooks]'

# %%
import logging
import random
from contextlib import ExitStack
from typing import Any

import matplotlib.pyplot as plt

import art
from art.recipes import compare_checkpoints
from art.recipes.pictures import plot_learning, plot_scores
from art.rewards import GroupScorer, Ruler
from art.scenarios import generate_dataset
from art.task import Conversation
from art.testing.judge import ScriptedJudge
from art.testing.tiny_model import build_tiny_model
from art_recipes.dataset_task import DatasetTask
from art_recipes.scenarios.writer import Writer
from art_recipes.scripted_generator import ScriptedGenerator

# %% [markdown]
# ## What to train, and where
#
# This is the only cell to change for another model or another machine.

# %% tags=["parameters"]
JOB = "Say which desk a customer's message is for: billing, shipping or returns"
BASE_MODEL = "tiny"  # made below; with a GPU e.g. "Qwen/Qwen2.5-7B-Instruct"
BACKEND = art.LocalBackend(path="runs/auto_rl")  # trains on this machine
# BACKEND = art.RemoteBackend("http://gpu-machine:5000", api_key="...")  # or a server that can load the base model
NAME = "desk-001"  # a name that exists is trained further; take another to begin again
WARM_START_STEPS = 200  # only for the tiny model
INPUTS = 72
STEPS = 20
LEARNING_RATE = 3e-3  # for a tiny model; 1e-5 for a pretrained one

# %% [markdown]
# ## The scripted generator and judge
#
# The generator knows some messages of customers. The judge knows the right desk of each, makes errors (`noise`) and
# favours the answer that it is shown first (`position_bias`), as real judges do.

# %%
COMPLAINTS = {
    "billing": ["the invoice is wrong", "you charged me twice", "my payment was declined", "the bill has no date",
                "I need a receipt", "the discount is missing", "a fee was added", "I would like to pay later"],
    "shipping": ["the courier lost my parcel", "tracking stands still", "nobody rang the bell", "I have moved",
                 "the driver left it in the rain", "delivery takes too long", "half of the order is missing",
                 "do you ship to Iceland"],
    "returns": ["the zip broke", "these shoes are too small", "I want to swap blue for green", "the lamp does not work",
                "two plates came in pieces", "the kettle leaks", "a seam has torn", "how do I send it back"],
}  # fmt: skip
GREETINGS = ["", "Hello, ", "Good morning. ", "Dear team, "]
RIGHT = {f"{hello}{said}.": desk for desk, texts in COMPLAINTS.items() for said in texts for hello in GREETINGS}
MESSAGES = random.Random(0).sample(list(RIGHT), len(RIGHT))


def grade(trajectory: dict[str, Any]) -> tuple[float, str]:
    """Score an answer from 0 to 1, and explain the score in a sentence."""
    messages = [*trajectory.get("context", []), *trajectory["messages"]]
    answer, right = messages[-1]["content"].strip(), RIGHT[messages[1]["content"]]
    if answer == right:
        return 0.95, "The right desk, in one word."
    return (0.6, "The right desk, with more words.") if right in answer else (0.2, f"It is for {right}.")


generator = ScriptedGenerator(inputs=MESSAGES, system_prompt="Name the desk: billing, shipping or returns.")
judge = ScriptedJudge(grade, noise=0.1, position_bias=0.1)
servers = ExitStack()  # both answer on ports of this machine until the last cell
for server in (generator, judge):
    servers.enter_context(server)
writer = Writer("openai/generator", base_url=generator.base_url, api_key="none")
ruler = Ruler("openai/judge", extra_litellm_params={"base_url": judge.base_url, "api_key": "none"})
# With real models: writer = Writer("openai/gpt-4.1") and ruler = Ruler("openai/o3"), which read OPENAI_API_KEY

# %% [markdown]
# ## From the sentence to a task
#
# The generator writes a system prompt, a rubric and the inputs. Duplicates are dropped and written again. A hash of
# each input decides whether it is for training or held out.

# %%
dataset = await generate_dataset(JOB, num=INPUTS, generator=writer)
task = DatasetTask(dataset)
print(dataset.summary())
print("system prompt:", dataset.task.system_prompt)
for line in dataset.split("train")[:3]:
    print("   input:", line.input)

# %% [markdown]
# ## A tiny model that knows the format
#
# A pretrained model begins with an idea of the job. The tiny one has 0.1 million parameters and random weights. In its
# warm start it reads answers of which somewhat more than half are right, and a few that are too long.

# %%
if BASE_MODEL == "tiny":
    rng, guesses = random.Random(0), ["billing", "shipping", "returns", "billing or returns", "sorry"]
    play = []
    for text in rng.choices(MESSAGES, k=3000):
        answer = RIGHT[text] if rng.random() < 0.4 else rng.choice(guesses)
        roles = {"system": dataset.task.system_prompt, "user": text, "assistant": answer}
        play.append(Conversation(messages=[{"role": role, "content": content} for role, content in roles.items()]))
    BASE_MODEL = str(build_tiny_model("runs/auto_rl_tiny", conversations=play, warm_start_steps=WARM_START_STEPS))

# %% [markdown]
# ## Train on the judge's scores
#
# `after_each` gives every finished group to the judge, which compares its 8 answers. Its scores are the only reward.

# %%
model = art.TrainableModel(name=NAME, project="auto-rl", base_model=BASE_MODEL)
await model.register(BACKEND)
logging.getLogger("art.rewards").setLevel(logging.ERROR)  # it would say of each group that its answers are equal
training = task.scenarios("train", seed=0, count=len(dataset.split("train")))
pipeline = art.pipeline(
    model,
    scenarios=training,
    rollout=task.rollout,
    after_each=GroupScorer(ruler),
    groups_per_step=12,
    rollouts_per_group=8,
)
scores = {}
async for step in pipeline.train(STEPS, learning_rate=LEARNING_RATE):
    scores[step.number] = step.reward
    print(f"step {step.number:>3}  mean score of the judge {step.reward:.3f}")

# %% [markdown]
# ## Before and after, judged together
#
# A judge that compares has no fixed scale: 0.6 means "good beside these others". So for each held-out input the
# answers of the untrained and of the trained model are one question to the judge, which is not told which is which.

# %%
held_out = task.scenarios("test", seed=0, count=30)
last = await model.get_step()
result = await compare_checkpoints(model, task, held_out, before=0, after=last, rollouts=4, score=GroupScorer(ruler))
before, after = ([pair.before_score for pair in result.compared], [pair.after_score for pair in result.compared])

figure, axes = plt.subplots(figsize=(8, 4))
plot_learning(axes, scores, held_out={0: before, last: after}, measure="judge's score", title=JOB)

# %% [markdown]
# Each point is a held-out input, with the mean score of its 4 answers:

# %%
figure, axes = plt.subplots(figsize=(8, 2.2))
plot_scores(axes, {"before": before, "after": after})

# %%
for pair in result.compared[:5]:
    print(pair.scenario.inputs["input"])
    for name, rollouts in (("before", pair.before), ("after", pair.after)):
        answers = [f"{t.messages()[-1]['content']} ({t.reward:.2f})" for t in rollouts]
        print(f"    {name:<7}{', '.join(answers)}")

# %% [markdown]
# Is the judge right? The share of right answers is known here, and the judge was never told to count it:

# %%
for name, side in (("before", "before"), ("after", "after")):
    answers = [
        (t.messages()[1]["content"], t.messages()[-1]["content"]) for p in result.compared for t in getattr(p, side)
    ]
    print(f"{name:<7}{sum(RIGHT[text] == answer for text, answer in answers) / len(answers):.0%} right")

# %%
await BACKEND.close()
servers.close()

# %% [markdown]
# ## Your own job, and a real model
#
# - **In one command.** `art auto "your sentence" --model MODEL --judge openai/o3` does all of this and writes a
#   report; its files can be edited and the run continued, see [docs/autorl.md](../../docs/autorl.md).
# - **Judge.** Measure it before you pay for a long run: `art judge check`, see
#   [docs/rewards.md](../../docs/rewards.md).
# - **Model.** On a machine with a GPU set `BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"` and `LEARNING_RATE = 1e-5`. A
#   pretrained model needs no warm start, and no messages of your own. `art doctor MODEL` says before the training
#   whether it fits.
