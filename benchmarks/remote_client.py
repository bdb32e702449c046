"""The user's script of `remote_storm`: trains on a server elsewhere, step after step, and writes down the losses.

    ART_SERVER_URL=... ART_API_KEY=... python -m benchmarks.remote_client --model DIR --record FILE --steps 3
    ... --stop FILE          in place of --steps: until there is such a file

Each line of the record is JSON: {"step": n, "losses": {...}}. It knows nothing of servers that die.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import art

PROMPTS = ["respond with yes or no", "say yes, no or maybe", "yes or maybe?"]
ROLLOUTS, TURNS = 8, 2
LEARNING_RATE = 1e-3
LOSSES = ("loss/train", "loss/grad_norm", "loss/entropy", "loss/adapter_norm")
"""The loss alone is near 0 by design."""
SERVER_ONLY = {"torch", "transformers", "numpy", "uvicorn"}


async def rollout(model: art.TrainableModel, prompt: str, seed: int) -> art.Trajectory:
    items: list[Any] = [{"role": "user", "content": prompt}]
    trajectory = art.Trajectory(messages_and_choices=items)
    for turn in range(TURNS):
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            seed=TURNS * seed + turn,
            max_completion_tokens=8,
        )
        trajectory.messages_and_choices += [completion.choices[0], {"role": "user", "content": prompt}]
    trajectory.messages_and_choices.pop()
    trajectory.reward = random.Random(seed).random()  # there is always something to learn, and never an end of it
    return trajectory


async def run(base_model: str, record: Path, steps: Iterable[int], stop: Path | None) -> None:
    async with art.RemoteBackend() as backend:
        model = art.TrainableModel(name="agent", project="storm", base_model=base_model, base_path=str(record.parent))
        await model.register(backend)
        for step in steps:
            groups = await art.gather_trajectory_groups(
                (
                    art.TrajectoryGroup(rollout(model, prompt, 1000 * step + 100 * place + i) for i in range(ROLLOUTS))
                    for place, prompt in enumerate(PROMPTS)
                ),
                pbar_desc=None,
            )
            result = await backend.train(model, groups, learning_rate=LEARNING_RATE)
            losses = {name: result.metrics[name] for name in LOSSES}
            with record.open("a") as file:
                file.write(json.dumps({"step": result.step, "losses": losses}) + "\n")
            if stop is not None and await asyncio.to_thread(stop.exists):
                return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--record", type=Path, required=True)
    ends = parser.add_mutually_exclusive_group(required=True)
    ends.add_argument("--steps", type=int)
    ends.add_argument("--stop", type=Path)
    args = parser.parse_args()
    steps = itertools.count() if args.steps is None else range(args.steps)
    asyncio.run(run(args.model, args.record, steps, args.stop))
    if loaded := SERVER_ONLY & sys.modules.keys():
        raise SystemExit(f"a client needs the core package only, but this one has loaded {sorted(loaded)}")


if __name__ == "__main__":
    main()
