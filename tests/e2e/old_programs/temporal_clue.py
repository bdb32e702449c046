"""Temporal Clue: single-turn puzzles, validation and training gathered at the same time, four puzzles a step."""

import asyncio
import random
import re

import art
from art.local import LocalBackend
from art.utils import iterate_dataset

BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"
ROLLOUTS = 50
VAL = 64
EPOCHS = 1
PUZZLES = [
    {
        "num_clues": 2,
        "prompt": f"Puzzle {i}: who did it, where?",
        "solution": {"A": "green" if i % 2 else "red", "B": "hall"},
    }
    for i in range(128)
]


async def rollout(model: art.Model, puzzle: dict) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": puzzle["prompt"]}]
    completion = await model.openai_client().chat.completions.create(
        messages=messages, model=model.get_inference_name(), max_tokens=64
    )
    choice = completion.choices[0]
    right = 0
    for key, value in puzzle["solution"].items():
        found = re.findall(rf"{key}\. ([A-Za-z]+)", choice.message.content or "")
        right += bool(found) and found[-1].strip().lower() == value
    accuracy = right / len(puzzle["solution"])
    return art.Trajectory(
        messages_and_choices=[*messages, choice], reward=accuracy, metrics={"acc": accuracy}, puzzle=puzzle
    )


async def main():
    random.seed(42)
    backend = LocalBackend(path="./.art")
    model = art.TrainableModel(
        name="001", project="temporal-clue", base_model=BASE_MODEL,
        _internal_config={"init_args": {"gpu_memory_utilization": 0.775}},
    )  # fmt: skip
    await model.register(backend)
    train, val = PUZZLES[VAL:], PUZZLES[:VAL]
    for batch, _epoch, global_step, _epoch_step in iterate_dataset(
        train, groups_per_step=4, num_epochs=EPOCHS, initial_step=await model.get_step(), use_tqdm=False
    ):
        val_groups, train_groups = await asyncio.gather(
            art.gather_trajectory_groups(
                (art.TrajectoryGroup(rollout(model, p) for _ in range(2)) for p in val), pbar_desc="val"
            ),
            art.gather_trajectory_groups(
                (art.TrajectoryGroup(rollout(model, p) for _ in range(ROLLOUTS)) for p in batch), pbar_desc="train"
            ),
        )
        await model.log(val_groups)
        await model.delete_checkpoints()
        await model.train(train_groups, config=art.TrainConfig(learning_rate=5e-5))


if __name__ == "__main__":
    asyncio.run(main())
