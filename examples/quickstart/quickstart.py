"""Teach a model to answer "maybe", with your own rollout and reward, on this machine.

art tiny-model ./tiny --task yes_no_maybe     # or any Hugging Face model that fits on your machine
python quickstart.py
"""

import asyncio

import art

PROMPTS = ["respond with yes or no", "say yes, no or maybe", "answer maybe, no or yes", "yes or maybe?"]
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}


async def rollout(model: art.TrainableModel, prompt: str) -> art.Trajectory:
    messages = [{"role": "user", "content": prompt}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_completion_tokens=8
    )
    choice = completion.choices[0]
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=REWARDS.get(choice.message.content, 0.0))


async def main() -> None:
    async with art.LocalBackend() as backend:
        model = art.TrainableModel(name="agent-001", project="yes-no-maybe", base_model="./tiny")
        await model.register(backend)
        pipeline = art.pipeline(model, scenarios=PROMPTS, rollout=rollout, rollouts_per_group=16, groups_per_step=4)
        async for step in pipeline.train(steps=15, learning_rate=2e-3):
            print(step.line())


if __name__ == "__main__":
    asyncio.run(main())
