"""The user's script of `pipeline_storm`: a pipeline whose rollouts follow from their seeds.

    python -m benchmarks.pipeline_client --data-dir DIR --model DIR --record FILE --steps 60 --staleness 2

The record gets a line {"exchange": id, "text": ...} for each answer, {"ended": seed} for each rollout that came to its
end, and {"error": ...} for what a user would see, after which the script begins again. Everything else is read from the
log of the model.
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
            choice = completion.choices[0]
            self.record.write(exchange=choice.model_extra["exchange_id"], text=choice.message.content)  # type: ignore[index]
            items.append(choice)
            await asyncio.sleep(min(1.5, rng.lognormvariate(-3.5, 1.2)))  # median 30 ms
        self.record.write(ended=seed)
        # There is always something to learn, and never an end of it.
        return art.Trajectory(messages_and_choices=items, reward=rng.random(), metadata={"seed": str(seed)})


def may_go_on(gate: Path, step: int) -> bool:
    return not gate.exists() or step < int(gate.read_text())


async def run(args: argparse.Namespace, record: Record) -> None:
    while True:
        try:
            async with art.LocalBackend(path=args.data_dir, server_config=SERVER) as backend:
                model = art.TrainableModel(
                    name=NAME,
                    project=PROJECT,
                    base_model=str(args.model),
                    base_path=str(args.data_dir),
                    settings=art.ModelSettings(
                        engine=EngineConfig(num_threads=1), trainer=TrainerConfig(num_threads=1)
                    ),
                )
                await model.register(backend)
                pipeline = art.pipeline(
                    model, scenarios=SCENARIOS, rollout=Agent(record).rollout, rollouts_per_group=ROLLOUTS,
                    groups_per_step=GROUPS, max_staleness=args.staleness, max_concurrent=None,
                )  # fmt: skip
                async for step in pipeline.train(steps=args.steps, learning_rate=LEARNING_RATE):
                    while not may_go_on(args.gate, step.number):
                        await asyncio.sleep(0.05)
            return
        except ArtError as error:  # what a user would see; a new backend, as if the script were started again
            record.error(error, "the run")


def options() -> argparse.ArgumentParser:
    """What `PipelineRun` tells its script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--staleness", type=int, required=True)
    parser.add_argument("--gate", type=Path, required=True, help="file with the number of steps that may be trained")
    return parser


def main() -> None:
    args = options().parse_args()
    asyncio.run(run(args, Record(args.record)))


if __name__ == "__main__":
    main()
