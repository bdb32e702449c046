"""Train the agent of `agent.py`, and show what it answers on other mailboxes before and after; see README.md.

python train.py ./tiny     # or any Hugging Face model that calls tools and that your machine can hold
"""

import argparse
import asyncio
import statistics

from agent import rollout

import art
from art.tasks.search_emails import SearchEmails


async def evaluate(model: art.TrainableModel, count: int) -> str:
    """What comes of held-out questions: the same ones each time."""
    scenarios = SearchEmails().scenarios("test", seed=0, count=count)
    group = await art.gather_trajectories((rollout(model, scenario) for scenario in scenarios), pbar_desc="test")
    correct = statistics.fmean(trajectory.metrics["correct"] for trajectory in group)
    reward = statistics.fmean(trajectory.reward for trajectory in group)
    return f"{correct:.1%} correct, mean reward {reward:.3f}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base_model", help="hub id or path")
    parser.add_argument("--name", default="agent-001", help="of the model; one that is known is trained further")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8, help="questions in a step")
    parser.add_argument("--rollouts", type=int, default=8, help="of each question")
    parser.add_argument("--tests", type=int, default=200, help="held-out questions, asked before and after")
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    options = parser.parse_args()

    async with art.LocalBackend() as backend:
        model = art.TrainableModel(name=options.name, project="langgraph", base_model=options.base_model)
        await model.register(backend)
        print(f"before: {await evaluate(model, options.tests)}", flush=True)
        for step in range(await model.get_step(), options.steps):
            scenarios = SearchEmails().scenarios("train", seed=options.seed * 1000 + step, count=options.groups)
            groups = await art.gather_trajectory_groups(
                (
                    art.TrajectoryGroup(rollout(model, scenario) for _ in range(options.rollouts))
                    for scenario in scenarios
                ),
                pbar_desc=f"step {step}",
                max_exceptions=options.rollouts,
            )
            rewards = [trajectory.reward for group in groups for trajectory in group]
            print(f"step {step}: mean reward {statistics.fmean(rewards):.3f}", flush=True)
            try:
                await model.train(groups, config=art.TrainConfig(learning_rate=3e-3))
            except art.errors.NothingTrainableError as error:
                print(f"step {step} is left out: {error}")
        print(f"after:  {await evaluate(model, options.tests)}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
