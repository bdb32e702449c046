"""Learning on a Ray cluster beside learning at home: tic-tac-toe with the same seeds, without staleness.

At home one engine and one trainer process play and train. On Ray there are two nodes, on this machine, with two
engines, a trainer of two ranks, and four processes that run the rollouts. Which requests share a batch differs, and so
do the last bits of log-probs. Both must learn as much, within the noise of the held-out games. The seeds are those of
scenarios and sampling; all trainings start from one tiny model.

    python -m benchmarks cluster_learning --json cluster_learning.json
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

import art
from art.config import TrainConfig
from art.metrics.scores import estimate_change
from art.task import draw_scenarios, get_task
from art.testing.tiny_model import build_tiny_model
from art_recipes.training.training_loop import Evaluation, evaluate
from benchmarks.report import Cell, Result
from benchmarks.timing import progress
from tests.support.clusters import ray_nodes, registered, settings

TASK = get_task("tic_tac_toe")
NODE_CPUS = (3, 2)
"""Four actors fill all but one CPU, which the rollout workers share."""


async def game(model: art.TrainableModel[Any, Any], scenario: art.Scenario, rollout_index: int) -> art.Trajectory:
    return await TASK.rollout(model, scenario, rollout_index=rollout_index)


async def learn(folder: Path, base_model: Path, seed: int, args: argparse.Namespace, *, on_ray: bool) -> list[Any]:
    """Train a model. Returns its evaluations before and after, and the seconds of the training alone."""
    steps, defaults = args.learning_steps, TASK.defaults.for_base_model(str(base_model))
    async with AsyncExitStack() as stack:
        backend = art.LocalBackend(path=folder, cluster="ray" if on_ray else None, show_page=False)
        await stack.enter_async_context(backend)
        about = settings(ranks=2, replicas=2) if on_ray else settings()
        model = await registered(backend, base_model, about)
        before = await evaluate(model, TASK, count=args.held_out, seed=seed)
        workers = await stack.enter_async_context(art.RayWorkers(4, cpus=0.25)) if on_ray else None
        num_groups = defaults.groups_per_step
        pipeline = art.pipeline(
            model, scenarios=draw_scenarios(TASK, "train", seed=seed, count=num_groups * steps), rollout=game,
            rollouts_per_group=defaults.rollouts_per_group, groups_per_step=num_groups, max_staleness=0, seed=seed,
            workers=workers,
        )  # fmt: skip
        config = TrainConfig(learning_rate=defaults.rate_schedule(steps), num_minibatches=defaults.num_minibatches)
        started = time.monotonic()
        async for step in pipeline.train(steps, config):
            dropped = sum(value for name, value in step.metrics.items() if name.startswith("ledger/dropped_tokens/"))
            if step.metrics["ledger/sampled_tokens"] != step.metrics["ledger/trained_tokens"] + dropped:
                raise RuntimeError(f"step {step.number}: the ledger is not closed: {step.metrics}")
        seconds = time.monotonic() - started
        return [before, await evaluate(model, TASK, count=args.held_out, seed=seed), seconds]


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--learning-steps", type=int, default=5, help="of each training (default: 5)")
    group.add_argument("--held-out", type=int, default=400, help="held-out games before and after (default: 400)")


def run(args: argparse.Namespace) -> Result:
    rows: list[dict[str, Cell]] = []
    notes = []
    seeds = range(1 if args.quick else 3)
    with tempfile.TemporaryDirectory() as name, progress("trainings", total=2 * len(seeds)) as bar:
        base_model = build_tiny_model(Path(name, "model"), task=TASK)
        for seed in seeds:
            folder = Path(name, str(seed))
            folder.mkdir()
            ends: list[Evaluation] = []
            for where in ("home", "Ray"):
                with nullcontext() if where == "home" else ray_nodes(folder, *NODE_CPUS):
                    learning = learn(folder / where, base_model, seed, args, on_ray=where == "Ray")
                    before, after, seconds = asyncio.run(learning)
                ends.append(after)
                rows.append(
                    {
                        "seed": seed, "where": where, "wins before": before.mean, "wins after": after.mean,
                        "steps": args.learning_steps, "training s": seconds,
                    }
                )  # fmt: skip
                bar.update()
            change = estimate_change(ends[0].scores, ends[1].scores)
            notes.append(f"seed {seed}: wins on Ray minus wins at home, same games: {change.text(sign=True)}")
    return Result(
        summary=f"Tic-tac-toe, {args.held_out} held-out games before and after, at home and on two Ray nodes.",
        rows=rows, notes=notes, clock="wall",
    )  # fmt: skip
