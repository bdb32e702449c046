"""Train the agent of `agent.py`; see README.md.

python train.py ./tiny     # or any Hugging Face model that calls tools and that your machine can hold
"""

import asyncio
import sys

from agent import rollout

import art
from art.tasks.search_emails import SearchEmails


async def main(base_model: str) -> None:
    async with art.LocalBackend() as backend:
        model = art.TrainableModel(name="agent-001", project="langgraph", base_model=base_model)
        await model.register(backend)
        for step in range(await model.get_step(), 40):
            scenarios = SearchEmails().scenarios("train", seed=step, count=8)
            groups = await art.gather_trajectory_groups(
                (art.TrajectoryGroup(rollout(model, scenario) for _ in range(8)) for scenario in scenarios),
                pbar_desc=f"step {step}",
                max_exceptions=8,
            )
            rewards = [trajectory.reward for group in groups for trajectory in group]
            print(f"step {step}: mean reward {sum(rewards) / len(rewards):.3f}")
            try:
                await model.train(groups, config=art.TrainConfig(learning_rate=3e-3))
            except art.errors.NothingTrainableError as error:
                print(f"step {step} is left out: {error}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
