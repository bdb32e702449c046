"""Tasks whose tools are slow: an agent is told a word in each of six turns and has to repeat it.

What a tool takes depends only on the scenario, the rollout's index and the turn, so every arm of a comparison meets the
same latencies, and a simulation can be given them.

    user       say no
    assistant  no
    user       say maybe          after the tool's latency
    assistant  yes                 wrong: 5 of 6 right are a reward of 0.83
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from art.model import Model
from art.task import Conversation, Scenario, Split, Task, TaskDefaults, derive_seed, sample_answer
from art.trajectory import Trajectory

WORDS = ("yes", "no", "maybe")
NUM_TURNS = 6
P99_QUANTILE = 2.3263479
"""Normal quantile of 99 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A log-normal distribution of seconds, given by its median and its 99th percentile.

    Example: LogNormal(median_s=0.2, p99_s=5.0) has a mean of 0.52 s
    """

    median_s: float
    p99_s: float

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm."""
        return math.log(self.p99_s / self.median_s) / P99_QUANTILE

    @property
    def mean_s(self) -> float:
        return self.median_s * math.exp(self.sigma**2 / 2)

    def draw(self, rng: random.Random) -> float:
        return self.median_s * math.exp(self.sigma * rng.gauss())


WAITING = LogNormal(median_s=0.2, p99_s=5.0)
"""Latency of a tool that waits for something else, such as a web page. The mean is 0.52 s."""
COMPUTING = LogNormal(median_s=0.004, p99_s=0.2)
"""CPU time of a tool that computes, such as running tests. The mean is 0.016 s."""
TOOL_WORKERS = 2
"""Processes that run tools which compute."""

ToolCall = Callable[[int, int, int], Awaitable[None]]
"""A tool: `await tool(scenario_seed, rollout_index, turn)`."""


class RepeatTheWord(Task):
    """Answer each of six requests with the word that it names."""

    name: ClassVar[str] = "repeat_the_word"
    description: ClassVar[str] = "repeat the word of each of six requests"
    defaults: ClassVar[TaskDefaults] = TaskDefaults(
        num_steps=16,
        groups_per_step=8,
        rollouts_per_group=8,
        warm_start_steps=150,
        play_skill=0.5,
        learning_rate=4e-4,
    )

    def __init__(self) -> None:
        self.times = Times()

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        return [self.at(index, seed, split) for index in range(count)]

    def at(self, position: int, seed: int, split: Split = "train") -> Scenario:
        """Make the scenario at a position of an endless stream."""
        rng = random.Random(derive_seed(self.name, split, seed, position))
        return self.scenario(split, seed, position, {"words": rng.choices(WORDS, k=NUM_TURNS)})

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None,
        tool: ToolCall | None = None,
    ) -> Trajectory:  # fmt: skip
        trajectory = Trajectory(metadata={"scenario_id": scenario.id})
        num_right = 0
        for turn, word in enumerate(scenario.inputs["words"]):
            trajectory.messages_and_choices.append({"role": "user", "content": f"say {word}"})
            began_s = time.perf_counter()
            choice = await sample_answer(
                model, trajectory, step=step, temperature=1.0, max_completion_tokens=8,
                seed=derive_seed(scenario.seed, rollout_index, turn),
            )  # fmt: skip
            answered_s = time.perf_counter()
            self.times.requests_s.append(answered_s - began_s)
            num_right += choice.message.content == word
            if tool is not None:
                await tool(scenario.seed, rollout_index, turn)
                self.times.tools_s.append(time.perf_counter() - answered_s)
        trajectory.reward = num_right / NUM_TURNS
        return trajectory

    def play(self, rng: random.Random, skill: float) -> Conversation:
        messages: list[Any] = []
        for word in rng.choices(WORDS, k=NUM_TURNS):
            answer = word if rng.random() < skill else rng.choice(WORDS)
            messages += [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": answer}]
        return Conversation(messages=messages)


class Times:
    """Seconds that requests and tools took, as the rollouts saw them."""

    def __init__(self) -> None:
        self.requests_s: list[float] = []
        self.tools_s: list[float] = []


def draw(distribution: LogNormal, scenario_seed: int, rollout_index: int, turn: int) -> float:
    """Draw what a tool takes in one turn: the same in every run."""
    return distribution.draw(random.Random(derive_seed("tool", scenario_seed, rollout_index, turn)))


async def wait_for_something(scenario_seed: int, rollout_index: int, turn: int) -> None:
    """A tool that waits."""
    await asyncio.sleep(draw(WAITING, scenario_seed, rollout_index, turn))


async def answer_at_once(scenario_seed: int, rollout_index: int, turn: int) -> None:
    """A tool that takes no time."""


@dataclass(frozen=True, slots=True)
class Compute:
    """A tool that computes in one of `TOOL_WORKERS` processes."""

    workers: ProcessPoolExecutor

    async def __call__(self, scenario_seed: int, rollout_index: int, turn: int) -> None:
        cpu_s = draw(COMPUTING, scenario_seed, rollout_index, turn)
        await asyncio.get_running_loop().run_in_executor(self.workers, burn, cpu_s)


def burn(cpu_s: float) -> None:
    """Use a core for `cpu_s` seconds of CPU time."""
    end_s = time.process_time() + cpu_s
    while time.process_time() < end_s:
        sum(range(500))
