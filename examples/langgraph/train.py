"""Train the agent of `agent.py`, and test it on held-out tickets before and after; see README.md.

python train.py ./tiny     # or any Hugging Face model that calls tools and fits on your machine
"""

import argparse
import asyncio
import statistics

from agent import draw_tickets, rollout

import art


async def evaluate(model: art.TrainableModel, count: int) -> float:
    """The share of held-out tickets that the agent sends to the right team. The tickets are the same each time."""
    tickets = draw_tickets("test", seed=0, count=count)
    trajectories = await art.gather_trajectories((rollout(model, ticket) for ticket in tickets), pbar_desc="test")
    return statistics.fmean(trajectory.metrics["right"] for trajectory in trajectories)


async def train(
    backend: art.Backend, base_model: str, *, name: str, steps: int, tickets: int, rollouts: int, tests: int, seed: int
) -> None:
    model = art.TrainableModel(name=name, project="langgraph", base_model=base_model)
    await model.register(backend)
    print(f"before: {await evaluate(model, tests):.1%} of held-out tickets right", flush=True)
    for step in range(await model.get_step(), steps):
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(rollout(model, ticket) for _ in range(rollouts))
                for ticket in draw_tickets("train", seed=seed * 1000 + step, count=tickets)
            ),
            pbar_desc=f"step {step}",
        )
        rewards = [trajectory.reward for group in groups for trajectory in group]
        print(f"step {step}: mean reward {statistics.fmean(rewards):.3f}", flush=True)
        await model.train(groups, config=art.TrainConfig(learning_rate=3e-3))
    print(f"after: {await evaluate(model, tests):.1%} of held-out tickets right", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base_model", help="hub id or path of the base model")
    parser.add_argument("--name", default="agent-001", help="name of the model; an existing one is trained further")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--tickets", type=int, default=12, help="tickets per step")
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts of each ticket")
    parser.add_argument("--tests", type=int, default=150, help="held-out tickets to test on before and after")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training tickets")
    async with art.LocalBackend() as backend:
        await train(backend, **vars(parser.parse_args()))


if __name__ == "__main__":
    asyncio.run(main())
