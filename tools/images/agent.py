"""A short agent, which the walk runs inside the container: one chat, one training step, one chat with the new weights.

It prints the step of the model before and after, so that a second run shows what a restart kept.
"""

import asyncio
import sys

import art
from art.task import get_task


async def main(base_model: str) -> None:
    task = get_task("tic_tac_toe")
    async with art.RemoteBackend() as backend:  # the server of ART_SERVER_URL, with the key in ART_API_KEY
        model = art.TrainableModel(name="agent", project="walk", base_model=base_model)
        await model.register(backend)
        before = await model.get_step()
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(task.rollout(model, scenario, rollout_index=i) for i in range(8))
            for scenario in task.scenarios("train", seed=before, count=4)
        )
        result = await backend.train(model, groups)
        answer = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=[{"role": "user", "content": "hello"}], max_completion_tokens=4
        )
        print(before, result.step, answer.usage.completion_tokens if answer.usage else 0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
