"""Plans, rollouts and groups for tests of the pipeline's journal."""

from __future__ import annotations

from datetime import UTC, datetime

from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_message import ChatCompletionMessage

import art
from art.asynchronous.source import PlannedGroup, group_seed

IDENTITY = {"rollouts_per_group": 2, "seed": 0}


def plan(number: int, *, version: int = 0, num_rollouts: int = 2) -> PlannedGroup:
    return PlannedGroup(
        number=number, position=number, scenario_id=str(number % 3), pass_number=number // 3, policy_version=version,
        seed=group_seed(0, number), num_rollouts=num_rollouts,
    )  # fmt: skip


def answer(text: str, exchange_id: str) -> Choice:
    """An answer as a server gives it, with fields that OpenAI's type does not have."""
    return Choice(
        index=0, finish_reason="stop", message=ChatCompletionMessage(role="assistant", content=text),
        exchange_id=exchange_id, exchange={"step": 3},
    )  # type: ignore[call-arg]  # fmt: skip


def trajectory(number: int, index: int, reward: float = 1.0) -> art.Trajectory:
    """A rollout with an answer."""
    choice = answer(f"answer {index} \ud83d", f"x-{number}-{index}")
    return art.Trajectory(
        messages_and_choices=[{"role": "user", "content": "é\u2028?"}, choice], reward=reward,
        metrics={"win": 1, "odd": float("nan")}, metadata={"scenario_id": str(number)},
        start_time=datetime(2026, 1, 31, 10, 0, index, 120, tzinfo=UTC),
    )  # fmt: skip


def group(number: int, num_rollouts: int = 2) -> art.TrajectoryGroup:
    items = [trajectory(number, index, reward=0.1 * index) for index in range(num_rollouts)]
    return art.TrajectoryGroup(
        [*items, TimeoutError("late")], metadata={"scenario_id": str(number)}, metrics={"m": 1.5}
    )
