"""The user's script of `kill_storm`: trains step after step, and writes down all that it is told.

    python -m benchmarks.storm_client --data-dir DIR --model DIR --record FILE

Each line of the record is JSON: {"exchange": id, "text": ...} for an answer, {"step": n, "exchanges": [...], "metrics":
{...}} for a step, {"error": type, "message": ..., "during": ...} for a failure, which is tried again. It ends after the
step at which DIR/stop is found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import art
from art.config import ServerConfig, TrainConfig
from art.errors import ArtError
from art.messages import is_choice

PROMPTS = ["respond with yes or no", "say yes, no or maybe", "yes or maybe?"]
ROLLOUTS, TURNS = 4, 2
PROJECT, NAME = "storm", "agent"
SERVER = ServerConfig(heartbeat_timeout_s=60.0, child_start_timeout_s=120.0)


class Record:
    """Appended line by line, each one whole or absent; by several processes too."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **fields: Any) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(fields).encode() + b"\n")

    def error(self, error: BaseException, during: str) -> None:
        self.write(error=type(error).__name__, message=str(error), during=during)


async def rollout(model: art.TrainableModel, record: Record, prompt: str, seed: int) -> art.Trajectory:
    items: list[Any] = [{"role": "user", "content": prompt}]
    client = model.openai_client()
    for turn in range(TURNS):
        try:
            completion = await client.chat.completions.create(
                model=model.get_inference_name(),
                messages=art.Trajectory(messages_and_choices=items).messages(),
                seed=TURNS * seed + turn,
                max_completion_tokens=8,
            )
        except Exception as error:
            record.error(error, "a rollout")
            raise
        choice = completion.choices[0]
        record.write(exchange=choice.model_extra["exchange_id"], text=choice.message.content)  # type: ignore[index]
        items += [choice, {"role": "user", "content": prompt}]
    reward = random.Random(seed).random()  # there is always something to learn, and never an end of it
    return art.Trajectory(messages_and_choices=items[:-1], reward=reward)


async def one_step(backend: art.LocalBackend, model: art.TrainableModel, record: Record, seed: int) -> None:
    groups = await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(rollout(model, record, prompt, 1000 * seed + 100 * place + i) for i in range(ROLLOUTS))
            for place, prompt in enumerate(PROMPTS)
        ),
        pbar_desc=None,
        max_exceptions=len(PROMPTS) * ROLLOUTS,
    )
    if not groups:
        return
    result = await backend.train(model, groups, config=TrainConfig(learning_rate=1e-3))
    if not result.trained:
        return
    exchanges = [
        item.model_extra["exchange_id"]
        for group in groups
        for trajectory in group
        for item in trajectory.messages_and_choices
        if is_choice(item)
    ]
    ledger = {name: value for name, value in result.metrics.items() if name.startswith("ledger/")}
    record.write(step=result.step, exchanges=exchanges, metrics=ledger)


async def run(data_dir: Path, base_model: Path, record: Record) -> None:
    """Until there is a file `stop` in the data directory."""
    seed = os.getpid()
    while not (data_dir / "stop").exists():
        try:
            async with art.LocalBackend(path=data_dir, server_config=SERVER) as backend:
                model = art.TrainableModel(
                    name=NAME, project=PROJECT, base_model=str(base_model), base_path=str(data_dir)
                )
                await model.register(backend)
                record.write(registered=await model.get_step())
                while not (data_dir / "stop").exists():
                    seed += 1
                    await one_step(backend, model, record, seed)
        except ArtError as error:  # what a user would see; a new backend, as if the script were started again
            record.error(error, "the run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args()
    asyncio.run(run(args.data_dir, args.model, Record(args.record)))


if __name__ == "__main__":
    main()
