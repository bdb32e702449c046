"""Train on rollouts of a shell script that uses curl. Start a server, this, then `rollouts.sh`; see README.md."""

import asyncio
import sys

import art


async def train(backend: art.Backend, base_model: str, *, num_steps: int, num_groups: int, rollouts: int) -> None:
    """Train on the groups that `rollouts.sh` finishes. The script always samples from the newest policy."""
    model = art.TrainableModel(name="agent", project="shell", base_model=base_model)
    await model.register(backend)
    print(f"{model.get_inference_name()} is ready at step {await model.get_step()}", flush=True)
    for _ in range(num_steps):
        groups = await model.collect_trajectory_groups(num_groups, rollouts)
        result = await model.train(groups, config=art.TrainConfig(learning_rate=3e-3))
        rewards = [trajectory.reward for group in groups for trajectory in group]
        done = "trained on" if result.trained else "nothing to learn from"
        print(f"step {result.step}: {done} mean reward {sum(rewards) / len(rewards):.3f}", flush=True)


async def main() -> None:
    async with art.RemoteBackend() as backend:  # the server of ART_SERVER_URL, with the key in ART_API_KEY
        await train(backend, sys.argv[1], num_steps=10, num_groups=4, rollouts=8)


if __name__ == "__main__":
    asyncio.run(main())  # a hub id, or a path on the server's machine
