"""Yes, no, maybe with `model.train`, the smoke test of 2025."""

import asyncio
from itertools import permutations

import openai

import art
from art.local import LocalBackend

BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"
STEPS = 1000
ROLLOUTS = 32
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
PROMPTS = [
    f"{start} {', '.join(words)}"
    for start in ("respond with", "just")
    for n in (3, 2)
    for words in permutations(REWARDS, n)
]


async def rollout(client: openai.AsyncOpenAI, name: str, prompt: str) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": prompt}]
    completion = await client.chat.completions.create(messages=messages, model=name, max_tokens=100, timeout=100)
    choice = completion.choices[0]
    content = choice.message.content
    assert isinstance(content, str)
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=REWARDS.get(content, 0.0))


async def main():
    backend = LocalBackend()
    model = art.TrainableModel(name="001", project="yes-no-maybe", base_model=BASE_MODEL)
    await model.register(backend)
    client = model.openai_client()
    for _ in range(await model.get_step(), STEPS):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(client, model.name, prompt) for _ in range(ROLLOUTS)) for prompt in PROMPTS
        )
        await model.train(groups, config=art.TrainConfig(learning_rate=1e-4))
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
