# %% [markdown]
# # Quick start: a model that learns from rewards
#
# You will see a language model learn, from rewards alone, which of three answers pays best. The whole loop is in this
# notebook: ask the model, give each answer a reward, train, repeat. It takes about a minute on a laptop, without a GPU
# and without network.
#
# ART does the rest in processes of its own: a server that speaks OpenAI's protocol, an engine that samples, and a
# trainer that updates the model.

# %%
# %pip install 'agent-reinforcement-trainer[local,notebooks]'

# %%
import matplotlib.pyplot as plt

import art
from art.recipes.pictures import plot_learning, plot_scores
from art.testing.tiny_model import build_tiny_model

# %% [markdown]
# ## What to train, and where
#
# This is the only cell to change for another model or another machine.

# %% tags=["parameters"]
BASE_MODEL = "tiny"  # made below, in seconds; with a GPU e.g. "Qwen/Qwen2.5-7B-Instruct"
BACKEND = art.LocalBackend(path="runs/quick_start")  # trains on this machine
# BACKEND = art.RemoteBackend("http://gpu-machine:5000", api_key="...")  # or a server that can load the base model
NAME = "agent-001"  # a name that exists is trained further; take another to begin again
STEPS = 15
LEARNING_RATE = 2e-3  # for a tiny model; 1e-5 for a pretrained one

# %% [markdown]
# A tiny model has 0.1 million parameters. It is made here, with random weights, and then shown a few hundred answers
# so that it knows the three words. Which one is best it does not know.

# %%
if BASE_MODEL == "tiny":
    BASE_MODEL = str(build_tiny_model("runs/quick_start_tiny", task="yes_no_maybe"))

# %% [markdown]
# ## The agent and its reward
#
# A rollout is your own code. It asks the model through an ordinary OpenAI client, and returns what was said together
# with a reward. Here "maybe" earns 1, "no" 0.75 and "yes" 0.5, whatever the question. Four other questions are held
# out.

# %%
PROMPTS = ["respond with yes or no", "say yes, no or maybe", "answer maybe, no or yes", "yes or maybe?"]
HELD_OUT = ["just say no or yes", "answer with maybe or no", "maybe, yes or no?", "reply with no, maybe or yes"]
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}


async def rollout(model: art.TrainableModel, prompt: str, step: int | None = None) -> art.Trajectory:
    messages = [{"role": "user", "content": prompt}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step), messages=messages, max_completion_tokens=8
    )
    choice = completion.choices[0]
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=REWARDS.get(choice.message.content, 0.0))


# %% [markdown]
# ## Start, and look at the model before training

# %%
model = art.TrainableModel(name=NAME, project="quick-start", base_model=BASE_MODEL)
await model.register(BACKEND)


async def answers_of(step: int) -> list[art.Trajectory]:
    """Ask every held-out prompt 25 times at the checkpoint of a step. Step 0 is the untrained model."""
    return await art.gather_trajectories((rollout(model, prompt, step) for prompt in HELD_OUT * 25), pbar_desc=None)


before = await answers_of(step=0)
print(f"mean reward before training: {sum(answer.reward for answer in before) / len(before):.2f}")

# %% [markdown]
# ## Train
#
# In each step the model answers every prompt 16 times. The answers to one prompt are a group: those with more reward
# than the group's mean become more likely, the others less. This is GRPO. Each step ends with a new checkpoint, which
# answers the next step's requests.

# %%
rewards = {}
for step in range(await model.get_step(), STEPS):
    groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup(rollout(model, prompt) for _ in range(16)) for prompt in PROMPTS), pbar_desc=None
    )
    scores = [trajectory.reward for group in groups for trajectory in group]
    rewards[step + 1] = sum(scores) / len(scores)
    result = await BACKEND.train(model, groups, learning_rate=LEARNING_RATE)
    await model.log(groups, split="train", metrics=result.metrics, step=result.step)
    print(f"step {step + 1:>2}  mean reward {rewards[step + 1]:.3f}")
    if not result.trained:  # all answers of every group earn the same
        print(result.findings[0])
        break

# %% [markdown]
# ## What was learnt

# %%
after = await answers_of(step=await model.get_step())
rewards_before, rewards_after = ([answer.reward for answer in answers] for answers in (before, after))

figure, axes = plt.subplots(figsize=(8, 4))
held_out = {0: rewards_before, max(rewards, default=STEPS): rewards_after}
plot_learning(axes, rewards, held_out=held_out, title="Which answer pays best?")

# %% [markdown]
# The share of each answer, before and after:

# %%
figure, axes = plt.subplots(figsize=(8, 2.2))
plot_scores(axes, {"before": rewards_before, "after": rewards_after}, measure="reward: yes 0.5, no 0.75, maybe 1")

# %%
for prompt in HELD_OUT:
    first, last = ([a.messages()[-1]["content"] for a in answers if a.messages()[0]["content"] == prompt][:6]
                   for answers in (before, after))  # fmt: skip
    print(f"{prompt}\n    before  {', '.join(first)}\n    after   {', '.join(last)}")

# %% [markdown]
# Every checkpoint is on the disk, and `art view runs/quick_start` opens a page with all curves and answers. Stop the
# server when you are done:

# %%
await BACKEND.close()

# %% [markdown]
# ## Your own agent, and a real model
#
# - **Agent.** Replace `PROMPTS` by your inputs and `rollout` by your agent's code: any number of turns and tools.
#   Append each `choice` that the client returns, and set the reward at the end. `art new my_agent` writes a folder
#   with all parts of it, see [docs/your_own_agent.md](../../docs/your_own_agent.md).
# - **Reward.** If you cannot compute one, a language model can compare the answers of a group: the notebook
#   [art_e](art_e.ipynb) does so.
# - **Model.** On a machine with a GPU set `BASE_MODEL` to a model that can already do the task sometimes, e.g.
#   `Qwen/Qwen2.5-7B-Instruct`, and `LEARNING_RATE = 1e-5`. `art doctor MODEL` says before the training whether the
#   model fits and how long a step takes.
