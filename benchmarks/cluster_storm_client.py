"""The user's script of `cluster_storm`: a pipeline with rollouts in workers, whose answers do not depend on time.

The float32 numbers of a forward pass depend on how many rows it has, and so on what else an engine computes at that
moment and on what its cache holds. Here an engine computes one request at a time, each prompt is a single token, of
which no cache can save anything, and an answer that was interrupted is asked for again as a whole. What is left of time
is how an engine applies an adapter: beside the weights in its first passes, folded into them later. That changes a
log-prob by up to 2e-6.

    python -m benchmarks.cluster_storm_client --data-dir DIR --model DIR --record FILE --steps 60 --cluster ray

The record has also a line {"began": seed, "pid": ...} for each rollout that began.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import art
from art.config import EngineConfig, TrainerConfig
from art.errors import ArtError, RolloutError
from benchmarks.pipeline_client import GROUPS, LEARNING_RATE, ROLLOUTS, may_go_on, options
from benchmarks.storm_client import NAME, PROJECT, SERVER, Record

CHAT_TEMPLATE = "{{ messages[0]['content'] }}"
SCENARIOS = [{"id": letter, "prompts": [letter, letter.lower()]} for letter in "ABCDEFGHIJKLMNOPQRSTU"]
WORKERS, SEATS = 3, 4


@dataclass
class Agent:
    """Asks two questions in conversations of their own, with a tool in between whose latency has a long tail."""

    record: Record
    lost: frozenset[int] = frozenset()
    """Seeds of rollouts that end as those whose process died."""

    async def rollout(self, model: art.TrainableModel, scenario: dict[str, Any], seed: int) -> art.Trajectory:
        self.record.write(began=seed, pid=os.getpid())
        if seed in self.lost:
            raise RolloutError("its process died in the storm")
        rng = random.Random(seed)
        histories = []
        for prompt in scenario["prompts"]:
            question: Any = {"role": "user", "content": prompt}
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=[question], max_completion_tokens=8
            )
            choice = completion.choices[0]
            self.record.write(exchange=choice.model_extra["exchange_id"], text=choice.message.content)  # type: ignore[index]
            histories.append([question, choice])
            await asyncio.sleep(min(1.5, rng.lognormvariate(-3.5, 1.2)))  # median 30 ms
        self.record.write(ended=seed)
        # There is always something to learn, and never an end of it.
        return art.Trajectory(
            messages_and_choices=histories[0], reward=rng.random(), metadata={"seed": str(seed)},
            additional_histories=[art.History(messages_and_choices=history) for history in histories[1:]],
        )  # fmt: skip


async def run(args: argparse.Namespace, record: Record) -> None:
    lost = frozenset(json.loads(args.lost.read_text())) if args.lost else frozenset()
    # A frozen node is to be given up soon; on one machine a busy core must not look like that.
    server = SERVER.model_copy(update={"heartbeat_timeout_s": 15.0, "child_start_timeout_s": 240.0})
    while True:
        try:
            async with AsyncExitStack() as stack:
                backend = art.LocalBackend(path=args.data_dir, server_config=server, cluster=args.cluster)
                await stack.enter_async_context(backend)
                model = art.TrainableModel(
                    name=NAME,
                    project=PROJECT,
                    base_model=str(args.model),
                    base_path=str(args.data_dir),
                    settings=art.ModelSettings(
                        engine=EngineConfig(replicas=2, num_threads=1, max_running=1),
                        trainer=TrainerConfig(num_processes=2, num_threads=1),
                    ),
                )
                await model.register(backend)
                workers = None
                if args.cluster:
                    workers = art.RayWorkers(WORKERS, cpus=0.25, concurrency=SEATS)
                    await stack.enter_async_context(workers)
                pipeline = art.pipeline(
                    model, scenarios=SCENARIOS, rollout=Agent(record, lost).rollout, rollouts_per_group=ROLLOUTS,
                    groups_per_step=GROUPS, max_staleness=args.staleness, max_concurrent=None, workers=workers,
                )  # fmt: skip
                async for step in pipeline.train(steps=args.steps, learning_rate=LEARNING_RATE):
                    while not may_go_on(args.gate, step.number):
                        await asyncio.sleep(0.05)
            return
        except ArtError as error:  # what a user would see; a new backend, as if the script were started again
            record.error(error, "the run")


def main() -> None:
    parser = options()
    parser.add_argument("--cluster", help="where engines, trainer and rollouts run (default: here)")
    parser.add_argument("--lost", type=Path, help="file with the seeds of rollouts that are to fail")
    args = parser.parse_args()
    asyncio.run(run(args, Record(args.record)))


if __name__ == "__main__":
    main()
