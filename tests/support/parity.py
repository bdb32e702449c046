"""A task for comparisons: say whether two numbers are even or odd, one turn each. And a server that knows it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from art.task import Scenario, Split, Task, derive_seed, sample_answer
from art.testing.scripted_server import Reply, completion
from art.trajectory import Trajectory

TOOL = {"type": "function", "function": {"name": "divide", "parameters": {"type": "object", "properties": {}}}}


class Parity(Task):
    name: ClassVar[str] = "parity"
    description: ClassVar[str] = "say whether numbers are even"
    headline_metric: ClassVar[str] = "right"
    with_tools: ClassVar[bool] = False

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        return [self.scenario(split, seed, index, {"number": 10 + index}) for index in range(count)]

    async def rollout(
        self, model: Any, scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        trajectory = Trajectory(messages_and_choices=[{"role": "system", "content": "even or odd?"}])
        tools = {"tools": [TOOL]} if self.with_tools else {}
        num_right, is_fault = 0, False
        for turn in range(2):
            number = scenario.inputs["number"] + turn
            trajectory.messages_and_choices.append({"role": "user", "content": str(number)})
            choice = await sample_answer(
                model, trajectory, step=step, temperature=1.0, max_completion_tokens=8,
                seed=derive_seed(scenario.seed, rollout_index, turn), **tools,
            )  # fmt: skip
            is_fault = is_fault or choice.message.content not in ("even", "odd")
            num_right += choice.message.content == say(number)
        trajectory.reward = -1.0 if is_fault else num_right / 2
        trajectory.metrics["right"] = float(num_right == 2)
        trajectory.metadata["outcome"] = "policy_fault" if is_fault else "ok"
        return trajectory


def say(number: int) -> str:
    return "odd" if number % 2 else "even"


class Server:
    """Counts and answers requests: right with probability `skill` by the request's own seed, or as `reply` says."""

    def __init__(self, reply: Callable[[int, dict[str, Any]], Reply | None] | None = None, skill: float = 1.0) -> None:
        """`reply` gets the number of the request and its body; `None` means the usual answer."""
        self.reply, self.skill = reply, skill
        self.bodies: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def __call__(self, body: dict[str, Any]) -> Reply:
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
        answer = None if self.reply is None else self.reply(number, body)
        return self.right(body) if answer is None else answer

    def right(self, body: dict[str, Any]) -> Reply:
        is_right = random.Random(body.get("seed", 0)).random() < self.skill
        asked = int(body["messages"][-1]["content"])
        return completion(body, {"content": say(asked if is_right else asked + 1)})
