"""A tiny model that learns generated chores through a coding agent's own loop, in containers.

The agent is installed and unmodified: its prompt, its tools, its way to end. The tiny model's warm start is on
conversations of this agent, recorded from a scripted model, in which the command for a chore is right by chance only.
Then it is trained by GRPO on containers, and asked for chores that it has not seen, before and after.

    python -m benchmarks chores_learning --json chores_learning.json
    python -m benchmarks chores_learning --agents codex --kinds total-column --seeds 7 --image my-debian
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import art
from art.client.rollout_context import derive_seed
from art.config import EngineConfig, ModelSettings, TrainConfig
from art.metrics.scores import estimate_change
from art.task import Conversation
from art.testing.tiny_model import build_tiny_model
from art_tasks.chores import KINDS, make_chores
from art_tasks.harbor import HarborTask
from benchmarks.report import Cell, Result, Spread
from benchmarks.timing import progress
from tests.clients.model import call, open_scripted_bench
from tests.support.gateway import make_tokenizer
from tests.support.served_app import serve_app

COMMANDS = {
    "largest": ["ls -S data | head -1 > answer.txt", "ls data | head -1 > answer.txt", "ls -t data > answer.txt"],
    "rename": ['for f in notes/*.txt; do mv "$f" "${f%.txt}.md"; done', "mv notes notes.md", "mv notes/*.txt *.md"],
    "total-column": [
        "awk -F, '{sum += $2} END {print sum}' stock.csv > total.txt", "wc -l < stock.csv > total.txt",
        "cut -d, -f2 stock.csv > total.txt",
    ],
}  # fmt: skip
"""For each kind of chore the right command and two wrong ones, which the warm start shows equally often."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
Solved = list[tuple[str, float]]
"""For each chore whether it was solved."""
ROLLOUTS_PER_GROUP, GROUPS_PER_STEP, LEARNING_RATE = 8, 3, 4e-3
MAX_TURNS = 4
"""Two are enough."""
CONTEXT = {"mini-swe-agent": 8_192, "codex": 65_536}


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--agents", nargs="+", choices=list(CONTEXT), default=["mini-swe-agent"])
    group.add_argument("--kinds", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    group.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    group.add_argument("--learning-steps", type=int, default=6, help="of each training (default: 6)")
    group.add_argument("--held-out", type=int, default=8, help="unseen chores of each kind (default: 8)")
    group.add_argument("--warm-start-steps", type=int, default=300, help="(default: 300)")
    group.add_argument("--image", default="debian:12-slim", help="image of the chores (default: debian:12-slim)")


def run(args: argparse.Namespace) -> Result:
    rows: list[dict[str, Cell]] = []
    notes = []
    with tempfile.TemporaryDirectory() as name, progress("trainings", total=len(args.agents) * len(args.seeds)) as bar:
        for agent in args.agents:
            folder = Path(name, f"{agent}-recorded")
            folder.mkdir()
            conversations = asyncio.run(record(folder, agent, args))
            for seed in args.seeds:
                started = time.monotonic()
                learning = learn(Path(name, f"{agent}-{seed}"), agent, seed, conversations, args)
                before, after, rewards, spent = asyncio.run(learning)
                change = estimate_change(before, after)
                rows.append(
                    {
                        "agent": agent, "seed": seed, "solved before": mean(value for _, value in before),
                        "solved after": mean(value for _, value in after), "steps": args.learning_steps,
                        "rollout s": Spread.of(spent), "minutes": (time.monotonic() - started) / 60,
                    }
                )  # fmt: skip
                by_step = " ".join(f"{reward:.2f}" for reward in rewards)
                learnt = f"training reward by step {by_step}"
                notes.append(f"{agent}, seed {seed}: {change.text(sign=True)}; {learnt}")
                bar.update()
    return Result(
        summary=f"Chores {', '.join(args.kinds)}: {args.held_out} unseen ones of each, before and after training.",
        rows=rows, notes=notes, clock="wall",
    )  # fmt: skip


def turns(agent: str, command: str) -> list[list[str]]:
    """What a model that runs one command, and then ends, says to an agent."""
    if agent == "mini-swe-agent":
        return [[call("bash", command=command)], [call("bash", command=SUBMIT)]]
    return [[call("exec_command", cmd=command)], ["It is done."]]


async def record(folder: Path, agent: str, args: argparse.Namespace) -> list[Conversation]:
    """Let the agent work for a scripted model: each kind with each command. Returns the conversations."""
    tokenizer = make_tokenizer(folder / "tokenizer")
    conversations = []
    async with serve_app(folder / "data", tokenizer, open_scripted_bench) as served:
        for kind in args.kinds:
            for number, command in enumerate(COMMANDS[kind]):
                place = write_chores(folder / f"{kind}-{number}", [kind], 1, args.image, seed=-1)
                served.app.bench.engine.turns = turns(agent, command)  # type: ignore[attr-defined]
                task = HarborTask(place, agent=agent)
                (scenario,) = task.scenarios("train", seed=0, count=1)
                rollout = await task.rollout(served.policy, scenario)
                if (rollout.reward == 1.0) != (number == 0):
                    raise RuntimeError(f"{agent}, {kind}, {command!r}: reward {rollout.reward}, expected {number == 0}")
                conversations.append(Conversation(messages=rollout.messages(), tools=rollout.tools))
    return conversations


def write_chores(folder: Path, kinds: Sequence[str], count: int, image: str, *, seed: int) -> Path:
    """Write `count` chores of each kind, with the image of this machine."""
    chores = [pair for pair in make_chores(len(KINDS) * count, seed=seed) if pair[1].kind in kinds]
    for name, chore in chores:
        chore.write(folder / name)
        settings = folder / name / "task.toml"
        settings.write_text(f'{settings.read_text()}\n[environment]\ndocker_image = "{image}"\n')
    return folder


async def learn(
    folder: Path, agent: str, seed: int, conversations: Sequence[Conversation], args: argparse.Namespace
) -> tuple[Solved, Solved, list[float], list[float]]:
    """Train a tiny model. Returns what it solved before and after, rewards by step, and the seconds of rollouts."""
    rng = random.Random(seed)
    base = build_tiny_model(
        folder / "base", conversations=rng.choices(conversations, k=300), seed=seed,
        warm_start_steps=args.warm_start_steps, context=CONTEXT[agent],
    )  # fmt: skip
    chores = HarborTask(
        write_chores(folder / "train", args.kinds, 4, args.image, seed=2 * seed), agent=agent, max_turns=MAX_TURNS
    )
    unseen = write_chores(folder / "unseen", args.kinds, args.held_out, args.image, seed=2 * seed + 1)
    held_out = HarborTask(unseen, agent=agent, max_turns=MAX_TURNS)
    held_out._splits["test"] = list(held_out.folders)  # all of this folder is held out
    settings = ModelSettings(engine=EngineConfig(max_context=CONTEXT[agent]))
    spent: list[float] = []
    rewards = []
    async with art.LocalBackend(path=folder / "data", show_page=False) as backend:
        model = art.TrainableModel(name="agent", project="chores", base_model=str(base), settings=settings)
        await model.register(backend)

        async def solved() -> Solved:
            scenarios = held_out.scenarios("test", seed=seed, count=args.held_out * len(args.kinds))
            done = await asyncio.gather(*(held_out.rollout(model, scenario) for scenario in scenarios))
            spent.extend(rollout.metrics["duration"] for rollout in done)
            return [(scenario.id, rollout.metrics["solved"]) for scenario, rollout in zip(scenarios, done, strict=True)]

        before = await solved()
        for step in range(args.learning_steps):
            scenarios = chores.scenarios("train", seed=derive_seed(seed, step), count=GROUPS_PER_STEP)
            groups = [
                art.TrajectoryGroup(
                    chores.rollout(model, scenario, rollout_index=index) for index in range(ROLLOUTS_PER_GROUP)
                )
                for scenario in scenarios
            ]
            done: list[Any] = await art.gather_trajectory_groups(groups, pbar_desc=None)
            spent.extend(rollout.metrics["duration"] for group in done for rollout in group)
            rewards.append(mean(rollout.reward for group in done for rollout in group))
            await model.train(done, TrainConfig(learning_rate=LEARNING_RATE, num_minibatches=2))
        return before, await solved(), rewards, spent
