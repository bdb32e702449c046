"""The work of `transport`: rollouts whose every turn is a branch, as their user and their server hold them.

A chat template that drops earlier reasoning makes each turn a branch: the next prompt repeats the conversation without
the reasoning of the last answer.

    turn 1   prompt   reasoning visible
    turn 2   prompt   visible observation   reasoning visible
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from art.record.recorder import Exchange, Recorder
from art.storage.database import Database
from art.trajectory import Trajectory, TrajectoryGroup

PROJECT, NAME = "benchmark", "agent"
VOCAB_SIZE = 151_936
PROMPT, REASONING, VISIBLE, OBSERVATION = 248, 80, 43, 323
"""Tokens of the first prompt, of each answer's two parts, and of what comes after an answer."""
_GROUP_SIZE = 8
_BATCH = 512
"""Exchanges that are recorded at once."""


@dataclass(frozen=True, slots=True)
class Work:
    num_rollouts: int
    num_turns: int

    @property
    def num_path_tokens(self) -> int:
        turns = range(self.num_turns)
        return self.num_rollouts * sum(PROMPT + k * (VISIBLE + OBSERVATION) + REASONING + VISIBLE for k in turns)

    @property
    def num_trained_tokens(self) -> int:
        return self.num_rollouts * self.num_turns * (REASONING + VISIBLE)


def exchange_id(rollout: int, turn: int) -> str:
    return f"ex_{rollout:08d}{turn:06d}"


def trajectory_groups(work: Work) -> list[TrajectoryGroup]:
    """What the user's process holds: messages and choices, without tokens."""
    groups = []
    for first in range(0, work.num_rollouts, _GROUP_SIZE):
        rollouts = range(first, min(first + _GROUP_SIZE, work.num_rollouts))
        groups.append(TrajectoryGroup([_trajectory(work, rollout) for rollout in rollouts]))
    return groups


def _trajectory(work: Work, rollout: int) -> Trajectory:
    from openai.types.chat.chat_completion import Choice

    items: list[Any] = [_opening(rollout)]
    for turn in range(work.num_turns):
        choice = {"index": 0, "finish_reason": "stop", "message": _answer(rollout, turn)}
        items += [Choice.model_validate(choice | {"exchange_id": exchange_id(rollout, turn)}), _observe(rollout, turn)]
    return Trajectory(messages_and_choices=items[:-1], reward=float(rollout % 2))


def _text(name: str, num_tokens: int) -> str:
    return f"{name} " + "word" * num_tokens


def _opening(rollout: int) -> dict[str, Any]:
    return {"role": "user", "content": _text(f"task {rollout // _GROUP_SIZE}", PROMPT)}


def _answer(rollout: int, turn: int) -> dict[str, Any]:
    reasoning = _text(f"thought {rollout} {turn}", REASONING)
    return {"role": "assistant", "content": _text(f"answer {rollout} {turn}", VISIBLE), "reasoning_content": reasoning}


def _observe(rollout: int, turn: int) -> dict[str, Any]:
    return {"role": "user", "content": _text(f"observation {rollout} {turn}", OBSERVATION)}


def exchanges(work: Work) -> Iterator[Exchange]:
    """What the server has recorded."""
    for rollout in range(work.num_rollouts):
        opening = np.random.default_rng(rollout // _GROUP_SIZE)
        own = np.random.default_rng(1_000_000 + rollout)
        prompt: list[int] = opening.integers(VOCAB_SIZE, size=PROMPT).tolist()
        messages = [_opening(rollout)]
        for turn in range(work.num_turns):
            answer: list[int] = own.integers(VOCAB_SIZE, size=REASONING + VISIBLE).tolist()
            yield Exchange(
                id=exchange_id(rollout, turn), rollout_id=None, project=PROJECT, name=NAME, policy_version=0,
                parent_id=None, branch_reason=None if turn == 0 else "reasoning_dropped",
                prompt_token_ids=prompt, completion_token_ids=answer, temperature=1.0, top_p=1.0, seed=turn,
                sampling_logprobs=(-own.exponential(size=len(answer))).tolist(), finish_reason="stop",
                message=_answer(rollout, turn), request_messages=messages, tools=None, created_at=0.0,
            )  # fmt: skip
            prompt = prompt + answer[REASONING:] + own.integers(VOCAB_SIZE, size=OBSERVATION).tolist()
            messages = [*messages, _answer(rollout, turn), _observe(rollout, turn)]


def record(work: Work, directory: Path) -> None:
    """Write the record that the server finds."""

    async def append_all() -> None:
        recorder = Recorder(Database(directory / "art.db"))
        await recorder.start()
        batch: list[Exchange] = []
        for exchange in exchanges(work):
            batch.append(exchange)
            if len(batch) == _BATCH:
                await asyncio.gather(*(recorder.append(one, conversation=one.id.encode()) for one in batch))
                batch.clear()
        await asyncio.gather(*(recorder.append(one, conversation=one.id.encode()) for one in batch))

    directory.mkdir(parents=True, exist_ok=True)
    asyncio.run(append_all())
