"""An agent that asks through litellm, by hand and with `litellm_completion_params`."""

import asyncio

from litellm import acompletion

import art
from art.local import LocalBackend
from art.utils.litellm import convert_litellm_choice_to_openai

BASE_MODEL = "Qwen/Qwen2.5-14B-Instruct"
STEPS = 2
ROLLOUTS = 4
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}


async def rollout(model: art.Model, by_hand: bool) -> art.Trajectory:
    messages = [{"role": "user", "content": "just no, yes"}]
    address = {
        "model": f"hosted_vllm/{model.name}", "base_url": model.inference_base_url, "api_key": model.inference_api_key
    }  # fmt: skip
    response = await acompletion(
        **(address if by_hand else model.litellm_completion_params()), messages=messages, max_completion_tokens=32
    )
    choice = convert_litellm_choice_to_openai(response.choices[0])
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=REWARDS.get(choice.message.content, 0.0))


async def main():
    backend = LocalBackend()
    model = art.TrainableModel(name="001", project="litellm", base_model=BASE_MODEL)
    await model.register(backend)
    for _ in range(await model.get_step(), STEPS):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model, by_hand) for _ in range(ROLLOUTS)) for by_hand in (True, False)
        )
        await model.train(groups, config=art.TrainConfig(learning_rate=1e-5))


if __name__ == "__main__":
    asyncio.run(main())
