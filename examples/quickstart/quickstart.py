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
        for step in range(await model.get_step(), 15):
            groups = await art.gather_trajectory_groups(
                (art.TrajectoryGroup(rollout(model, prompt) for _ in range(16)) for prompt in PROMPTS),
                pbar_desc=f"step {step}",
            )
            rewards = [trajectory.reward for group in groups for trajectory in group]
            print(f"step {step}: mean reward {sum(rewards) / len(rewards):.3f}")
            result = await backend.train(model, groups, learning_rate=2e-3)
            await model.log(groups, split="train", metrics=result.metrics, step=result.step)
            if not result.trained:
                print(f"ended at step {step}: {result.findings[0]}")
                break


if __name__ == "__main__":
    asyncio.run(main())
