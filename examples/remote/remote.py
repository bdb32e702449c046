"""Train tic-tac-toe on an `art-server` elsewhere. This machine only runs the rollouts: it needs no torch and no GPU."""

import asyncio
import sys

import art
from art.task import get_task


async def main(base_model: str, task_name: str = "tic_tac_toe", num_steps: int = 30) -> None:
    task = get_task(task_name)
    async with art.RemoteBackend() as backend:  # the server of ART_SERVER_URL, with the key in ART_API_KEY
        model = art.TrainableModel(name="agent-001", project="remote", base_model=base_model)
        await model.register(backend)
        config = art.TrainConfig(
            learning_rate=art.config.ScheduleConfig(peak=3e-3, total_steps=num_steps), num_minibatches=4
        )
        for step in range(await model.get_step(), num_steps):
            scenarios = task.scenarios("train", seed=step, count=8)
            groups = await art.gather_trajectory_groups(
                (
                    art.TrajectoryGroup(task.rollout(model, scenario, rollout_index=i) for i in range(8))
                    for scenario in scenarios
                ),
                pbar_desc=f"step {step}",
            )
            result = await backend.train(model, groups, config=config, verbose=True)
            await model.log(groups, split="train", metrics=result.metrics, step=result.step)
            shares = [trajectory.metrics[task.headline_metric] for group in groups for trajectory in group]
            print(f"step {result.step}: {task.headline_metric} {sum(shares) / len(shares):.0%}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))  # a hub id, or a path on the server's machine
