"""The user's script of `pipeline_storm`: a pipeline whose rollouts follow from their seeds.

    python -m benchmarks.pipeline_client --data-dir DIR --model DIR --record FILE --steps 60 --staleness 2

The record gets a line {"ended": seed} for each rollout that came to its end, and {"error": ...} for what a user would
see, after which the script begins again. Everything else is read from the log of the model.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path
from typing import Any

import art
from art.config import EngineConfig, TrainerConfig
from art.errors import ArtError
from benchmarks.storm_client import NAME, PROJECT, SERVER, Record

SCENARIOS = [
    {"id": f"{word}-{number}", "prompt": f"{word} {number}?"}
    for word in ("yes or no", "no or maybe", "maybe or yes") for number in range(7)
]  # fmt: skip
ROLLOUTS, GROUPS, TURNS = 4, 3, 2
LEARNING_RATE = 1e-3


class Agent:
    """Asks twice, with a tool in between whose latency has a long tail."""

    def __init__(self, record: Record) -> None:
        self.record = record

    async def rollout(self, model: art.TrainableModel, scenario: dict[str, str], seed: int) -> art.Trajectory:
        rng = random.Random(seed)
        items: list[Any] = []
        for _ in range(TURNS):
            items.append({"role": "user", "content": scenario["prompt"]})
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(),
                messages=art.Trajectory(messages_and_choices=items).messages(),
                max_completion_tokens=8,
            )
            items.append(completion.choices[0])
            await asyncio.sleep(min(1.5, rng.lognormvariate(-3.5, 1.2)))  # median 30 ms
        self.record.write(ended=seed)
        # There is always something to learn, and never an end of it.
        return art.Trajectory(messages_and_choices=items, reward=rng.random(), metadata={"seed": str(seed)})


async def run(args: argparse.Namespace, record: Record) -> None:
    while True:
        try:
            # A frozen node is to be given up soon; on one machine a busy core must not look like that.
            server = SERVER.model_copy(update={"heartbeat_timeout_s": 15.0}) if args.cluster else SERVER
            async with art.LocalBackend(path=args.data_dir, server_config=server, cluster=args.cluster) as backend:
                model = art.TrainableModel(
                    name=NAME,
                    project=PROJECT,
                    base_model=str(args.model),
                    base_path=str(args.data_dir),
                    settings=art.ModelSettings(
                        engine=EngineConfig(replicas=args.replicas, num_threads=1),
                        trainer=TrainerConfig(num_processes=args.ranks, num_threads=1),
                    ),
                )
                await model.register(backend)
                pipeline = art.pipeline(
                    model, scenarios=SCENARIOS, rollout=Agent(record).rollout, rollouts_per_group=ROLLOUTS,
                    groups_per_step=GROUPS, max_staleness=args.staleness, max_concurrent=None,
                )  # fmt: skip
                async for step in pipeline.train(steps=args.steps, learning_rate=LEARNING_RATE):
                    while args.gate.exists() and step.number >= int(args.gate.read_text()):
                        await asyncio.sleep(0.05)
            return
        except ArtError as error:  # what a user would see; a new backend, as if the script were started again
            record.error(error, "the run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--staleness", type=int, required=True)
    parser.add_argument("--gate", type=Path, required=True, help="file with the number of steps that may be trained")
    parser.add_argument("--cluster", help="where engines and trainer run (default: here)")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    asyncio.run(run(args, Record(args.record)))


if __name__ == "__main__":
    main()
