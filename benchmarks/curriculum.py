"""Does a policy learn more from as many rollouts with a curriculum?

A tiny model learns a table: for each of 30 keys one of 8 letters is right. Its warm start taught it 10 keys rightly, 10
wrongly, and random answers for 10. So a third of the groups is always solved, a third hardly ever, and a third
teaches from the beginning. Each setting trains with about as many rollouts, from the same warm start, and the mean
chance of the right letter over all keys is measured by sampling before and after.

    python -m benchmarks curriculum --json curriculum.json
    python -m benchmarks curriculum --quick
"""

from __future__ import annotations

import argparse
import asyncio
import random
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import art
from art.report import estimate, estimate_change
from art.task import Conversation, Scenario, Task
from art.testing.tiny.build import build_tiny_model
from art.trajectory import Trajectory
from benchmarks.report import Cell, Result

KEYS, LETTERS = 30, "abcdefgh"
GROUPS_PER_STEP, ROLLOUTS_PER_GROUP = 8, 8
EVALUATED = 16
"""Rollouts of each scenario in an evaluation."""
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "curriculum": {"curriculum": True},
}


def right_letter(key: int) -> str:
    return LETTERS[(key * 5 + key // 7) % len(LETTERS)]


class Table(Task):
    """Answer with the letter of a key."""

    name = "table"
    description = "look up a letter"
    headline_metric = "right"
    needs_reading = False

    def scenarios(self, split: Any, *, seed: int, count: int) -> list[Scenario]:
        return [self.scenario(split, seed, key, {"key": key}) for key in range(KEYS)]

    async def rollout(
        self, model: Any, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        key = scenario.inputs["key"]
        trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": _name(key)}])
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(step), messages=trajectory.messages(), max_completion_tokens=3
        )
        trajectory.messages_and_choices.append(completion.choices[0])
        trajectory.reward = float((completion.choices[0].message.content or "").strip() == right_letter(key))
        return trajectory

    def play(self, rng: random.Random, skill: float) -> Conversation:
        key = rng.randrange(KEYS)
        kind, right = key % 3, LETTERS.index(right_letter(key))
        letter = [right, (right + 3) % len(LETTERS), rng.randrange(len(LETTERS))][kind]
        content = LETTERS[letter]
        return Conversation(
            messages=[{"role": "user", "content": _name(key)}, {"role": "assistant", "content": content}]
        )


def _name(key: int) -> str:
    """Two letters, which a tiny model tells apart more easily than digits."""
    return string.ascii_uppercase[key % 26] + string.ascii_uppercase[7 + key // 26]


@dataclass(frozen=True, slots=True)
class Learnt:
    """What one run has learnt, and from how much."""

    before: float
    after: float
    rollouts: int
    useful_share: float
    seconds: float


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--curriculum-seeds", type=int, help="seeds of each setting (default: 5, with --quick 1)")
    group.add_argument("--curriculum-rollouts", type=int, help="rollouts of each run (default: 1280, with --quick 64)")
    group.add_argument("--curriculum-settings", nargs="+", choices=list(ARMS), help="settings to try (default: all)")


def run(args: argparse.Namespace) -> Result:
    seeds = range(args.curriculum_seeds or (1 if args.quick else 5))
    rollouts = args.curriculum_rollouts or (64 if args.quick else 1280)
    arms = ["plain", *(arm for arm in args.curriculum_settings or ARMS if arm != "plain")]
    by_seed = [asyncio.run(learn_all(seed, arms, rollouts, warm_steps=60 if args.quick else 300)) for seed in seeds]
    runs = {arm: [learnt[arm] for learnt in by_seed] for arm in arms}
    return Result(
        summary=f"{KEYS} keys, {len(seeds)} seeds, about {rollouts} rollouts per run; rewards are means over all keys.",
        rows=[_row(arm, outcomes, runs["plain"]) for arm, outcomes in runs.items()],
        notes=["`gain against plain`: difference of the gains of the same seed, with its 95 % interval over seeds"],
        clock="wall",
    )


async def learn_all(seed: int, arms: Sequence[str], rollouts: int, *, warm_steps: int) -> dict[str, Learnt]:
    """Train one model for each setting from the same warm start, one after the other."""
    learnt = {}
    with tempfile.TemporaryDirectory() as folder:
        base = build_tiny_model(Path(folder) / "base", task=Table(), seed=seed, warm_start_steps=warm_steps)
        async with art.LocalBackend(path=folder, show_page=False) as backend:
            for number, arm in enumerate(arms):
                model = art.TrainableModel(
                    name=f"agent{number}", project="table", base_model=str(base), report_metrics=[]
                )
                await model.register(backend)
                learnt[arm] = await learn(model, seed, ARMS[arm], rollouts)
                print(f"seed {seed}, {arm}: {learnt[arm]}", file=sys.stderr, flush=True)
    return learnt


async def learn(model: Any, seed: int, settings: dict[str, Any], rollouts: int) -> Learnt:
    """Train until `rollouts` rollouts were run, and measure the policy before and after."""
    task = Table()
    scenarios = task.scenarios("train", seed=0, count=KEYS)
    began = time.perf_counter()
    before = await measure(task, model, scenarios)
    sizes = {"groups_per_step": GROUPS_PER_STEP, "rollouts_per_group": ROLLOUTS_PER_GROUP, "max_staleness": 0}
    pipeline = art.pipeline(model, scenarios=scenarios, rollout=task.rollout, seed=seed, **sizes, **settings)
    num_run, shares = 0, []
    async for step in pipeline.train(steps=10_000, learning_rate=3e-3):
        num_run += int(step.metrics["pipeline/rollouts_run"])
        shares.append(step.metrics["pipeline/groups_useful_share"])
        if num_run >= rollouts:
            break
    await pipeline.close()
    after = await measure(task, model, scenarios)
    return Learnt(before, after, num_run, sum(shares) / len(shares), time.perf_counter() - began)


async def measure(task: Table, model: Any, scenarios: Sequence[Scenario]) -> float:
    """Return the mean reward of the newest checkpoint over all scenarios."""
    played = await art.gather_trajectories(
        (task.rollout(model, scenario) for scenario in scenarios for _ in range(EVALUATED)), pbar_desc=None
    )
    return sum(trajectory.reward for trajectory in played) / len(played)


def _row(arm: str, outcomes: Sequence[Learnt], plain: Sequence[Learnt]) -> dict[str, Cell]:
    own, other = ([one.after - one.before for one in runs] for runs in (outcomes, plain))
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    return {
        "settings": arm,
        "before": mean([one.before for one in outcomes]),
        "after": mean([one.after for one in outcomes]),
        "gain": estimate(own).text(sign=True),
        "gain against plain": estimate_change(enumerate(other), enumerate(own)).text(sign=True)
        if arm != "plain"
        else "",
        "useful groups": mean([one.useful_share for one in outcomes]),
        "rollouts": mean([one.rollouts for one in outcomes]),
        "wall s": mean([one.seconds for one in outcomes]),
    }
